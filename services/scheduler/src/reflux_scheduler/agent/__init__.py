"""The agent: parent of the role processes of one node."""
