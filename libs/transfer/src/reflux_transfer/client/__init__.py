"""The broker protocol from the publisher's and from the replica's side."""
