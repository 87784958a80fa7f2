"""Tables and figures of the papers, at the size of this machine: the framework, and a file for each study."""
