"""New weights that arrive over the network in a trainer's own forms: pickles of tensors, and a process group."""
