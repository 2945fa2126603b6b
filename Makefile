placeholder:
	@true
