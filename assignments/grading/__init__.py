"""The grader of the course: builds a student's file, runs it over real worlds, and judges what the ranks report."""
