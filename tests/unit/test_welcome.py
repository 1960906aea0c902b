"""What a launch prints once it serves."""

from orchestrator.api.welcome import curl_line, room_in_words, welcome
from specahead.config import ClientSettings
from specahead.config.access import Certificates
from specahead.engine.kv.pages import PAGE_SIZE
from specahead.wire.messages import ServiceStatus
from tests.unit.gateway import LIMITS

URL = "http://127.0.0.1:8000"


def test_lines_name_the_dashboard_the_placement_and_the_room_of_the_smallest_target() -> None:
    def target(pages: int) -> ServiceStatus:
        return ServiceStatus("", 1, [], "", {}, {"kv_pages": pages})

    services = {"target-1": target(4096 // PAGE_SIZE), "target-2": target(9), "draft": None}
    small = 9 * PAGE_SIZE
    lines = list(welcome(URL, ClientSettings(), LIMITS, 64, True, services, "together, since it fits"))
    assert lines[:2] == [f"dashboard: {URL}/dashboard", "placement: together, since it fits"]
    assert lines[2].startswith(f"KV room: {small:,} tokens in each of 2 targets; sessions at once: ")
    assert "/v1/chat/completions" in lines[3]


def test_room_is_counted_in_long_and_short_sessions() -> None:
    words = room_in_words(131_072, 1, 64, 32_768)
    assert words == "KV room: 131,072 tokens; sessions at once: 4 of 32,768 tokens, or 64 of 1,024 tokens"
    assert room_in_words(4096, 1, 64, 512) == "KV room: 4,096 tokens; sessions at once: 8 of 512 tokens"


def test_the_command_asks_as_the_server_wants_it() -> None:
    assert curl_line(URL, ClientSettings(), False).startswith(f"curl {URL}/v1/completions -H 'Content-Type")
    closed = ClientSettings(api_key="k", tls=Certificates(cert="c.pem", key="k.pem"))
    line = curl_line("https://h:1", closed, True)
    assert line.startswith('curl --cacert c.pem https://h:1/v1/chat/completions -H "Authorization: Bearer $SPECAHEAD')
