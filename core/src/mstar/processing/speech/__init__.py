"""What families that hear share: windows of long audio, transcripts and their formats, languages. No torch."""
