"""Operations of whole areas: functions that record operations in a `BlockBuilder`, beside its own methods."""
