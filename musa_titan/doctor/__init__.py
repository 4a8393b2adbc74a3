"""What is installed here, whether it fits together, and which patches the upstream would get.

Nothing heavy is imported: versions come from package metadata, patches are resolved against source text.
"""
