"""Where keys and values live: the shared context pool and the few tokens of the beams."""
