"""The backward passes of the families, a module each; see `cuflash.families` for their verbs."""
