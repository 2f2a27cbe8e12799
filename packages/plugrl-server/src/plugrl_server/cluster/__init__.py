"""The parts of a server that live in workers: acting in some, learning in others.

`Places` starts the workers on Ray; `SpreadAlgorithm` stands in front of an algorithm and sends its
work there. What holds the sockets cannot tell.
"""
