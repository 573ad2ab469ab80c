"""The bodies of composites, each under a name of its own: compiled code reaches a function only through a module that holds it. Filled by `composites`."""
