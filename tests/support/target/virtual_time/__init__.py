"""The policies of speculation in virtual time."""
