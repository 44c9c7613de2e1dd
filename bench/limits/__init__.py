"""How far the drafts of a head reach, and what limits them: vocabulary, ranking, its own states, or its knowledge."""
