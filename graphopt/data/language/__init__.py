"""Read text as rows of tokens: tokenizers, templates of chats, documents and examples."""
