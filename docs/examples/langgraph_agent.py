"""A graph of LangGraph calls a tool and answers: pip install langgraph langchain-openai.

Start the server first: specahead serve
"""

import os
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

URL = os.environ.get("SPECAHEAD_URL", "http://127.0.0.1:8000")
MODEL = "tiny-target"


@tool
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """Tell the weather of a city."""
    print(f"tool: the weather of {city}")
    return f"It is sunny in {city}."


model = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_tokens=64)
# The bundled model is too small to decide for a call by itself: the first node asks for one.
caller = model.bind_tools([weather], tool_choice="any", strict=True, parallel_tool_calls=False)
speaker = model.bind_tools([weather], strict=True)

graph = StateGraph(MessagesState)
graph.add_node("call", lambda state: {"messages": [caller.invoke(state["messages"])]})
graph.add_node("tools", ToolNode([weather]))
graph.add_node("speak", lambda state: {"messages": [speaker.invoke(state["messages"])]})
for before, after in ((START, "call"), ("call", "tools"), ("tools", "speak"), ("speak", END)):
    graph.add_edge(before, after)
messages = graph.compile().invoke({"messages": [("user", "Is it sunny in Rome?")]})["messages"]
print(f"answer: {messages[-1].content}")
