"""What every benchmark uses: processes, prompts, reports, flags."""
