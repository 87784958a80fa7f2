"""Tables and figures of the papers, at the size of this machine: what a study is, and a file for each."""
