"""Starting a run on many hosts, watching over it, and starting it again. Standard library only: no torch."""
