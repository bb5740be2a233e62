"""The bundled digits, as Parquet files; README.md names their source."""
