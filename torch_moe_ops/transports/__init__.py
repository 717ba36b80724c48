"""Ways to bring rows to the ranks that have their experts, and the results back; one file a transport."""
