"""Command lines of SGLang, SGL-JAX and slime: their flags, values and environment variables, and what happens here.

    foreign_flags   flags without a meaning here, each with its reason, and names of other engines' kernel libraries
    spellings       other names of flags and values, replaced by ours before the parser reads them
    environment     SGLANG_ variables
    on_cpu          flags of the target that a CPU cannot follow

Every replacement is a note, which the process logs once as a warning; nothing is ignored in silence.
"""
