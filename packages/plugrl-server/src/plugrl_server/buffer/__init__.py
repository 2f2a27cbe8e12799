"""Where frames are kept: in order for on-policy learning, in a ring for replay."""
