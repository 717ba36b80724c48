"""Tables of what was fastest on a device, the library's and the user's, and how they are read."""
