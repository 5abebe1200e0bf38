"""A trial of a study on parameter servers, with the record that every trainer leaves."""
