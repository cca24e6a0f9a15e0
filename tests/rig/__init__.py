"""What the tests on one device share: the kinds of device, ranks in processes, and what they do."""
