"""The model repository on disk: directories, versions, `config.pbtxt`, and settings of how models run. Loads no models."""
