"""Measurements that a reader can rerun: `python -m bench --help`."""
