"""The bundled digits, as Parquet files; README.md gives their source."""
