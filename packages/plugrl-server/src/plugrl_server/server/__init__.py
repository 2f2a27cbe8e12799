"""The server: threads that act and learn, and the sockets in front of them."""
