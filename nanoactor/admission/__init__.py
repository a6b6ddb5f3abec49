"""Checking of users' requests, and building of the messages that submit and admit them."""
