"""Chat with one or two models, on the terminal or in a browser."""

from kedge_lab.chat.chat import Chat, Reply, load_chat
from kedge_lab.chat.terminal import chat_on_terminal
from kedge_lab.chat.web import chat_server

__all__ = ["Chat", "Reply", "chat_on_terminal", "chat_server", "load_chat"]
