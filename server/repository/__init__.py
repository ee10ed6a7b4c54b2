"""What a model repository on disk says: directories, versions, `config.pbtxt`, and how a model is to run. Loads nothing."""
