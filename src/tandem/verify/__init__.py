"""Whether hand-offs give what this machine computes by itself: `tandem verify`."""
