"""The methods with messages: workers exchange with the center one by one."""
