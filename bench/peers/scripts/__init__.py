"""Scripts that run under the Pythons of others; they import nothing of ours."""
