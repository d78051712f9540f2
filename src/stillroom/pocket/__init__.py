"""The pocket world: three task families with exact verifiers, and small models trained on them.

`chains` (walking through doors), `facts` and `strings` each satisfy `stillroom.types.Task`; `tokenizers`
makes the two tokenizer families, and `assets` finds the models that the package carries.
"""
