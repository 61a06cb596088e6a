"""Flags of the HTTP servers; the engine never sees them."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from ascend_vllm import envs
from ascend_vllm.args.fields import flag, refuse_unsupported
from ascend_vllm.args.parser import LoRAModule
from ascend_vllm.errors import ConfigError

DEFAULT_MAX_SEQUENCES = 1024
# lists of more prompts are refused before they are checked
_MAX_SEQUENCES = 65_536
_LOG_LEVELS = ("debug", "info", "warning", "error", "critical", "trace")


@dataclasses.dataclass
class HttpArgs:
    """Address, encryption and limits, the same for both servers."""

    SECTION: ClassVar[str] = "HTTP server"

    host: str | None = flag(
        None,
        "The network address the server listens on. Without it the server listens on all addresses of the machine; "
        "127.0.0.1 admits only programs on the same machine.",
        example="--host 127.0.0.1",
    )
    port: int = flag(8000, "The network port the server listens on.", example="--port 8080")
    ssl_keyfile: str | None = flag(
        None,
        "The file with the server's private key. Together with --ssl-certfile it turns HTTPS on.",
        example="--ssl-keyfile key.pem --ssl-certfile cert.pem",
    )
    ssl_certfile: str | None = flag(
        None,
        "The file with the server's certificate. Together with --ssl-keyfile it turns HTTPS on.",
        example="--ssl-keyfile key.pem --ssl-certfile cert.pem",
    )
    ssl_ca_certs: str | None = flag(
        None,
        "The file with the certificates of those who may vouch for clients.",
        example="--ssl-ca-certs ca.pem --ssl-cert-reqs 2",
    )
    ssl_cert_reqs: int = flag(
        0,
        "Whether clients must show a certificate: 0 means no, 1 means they may, 2 means they must.",
        example="--ssl-ca-certs ca.pem --ssl-cert-reqs 2",
    )
    ssl_ciphers: str | None = flag(
        None,
        "The encryption methods that HTTPS may use in TLS 1.2, in OpenSSL's notation. Without it those with ECDHE "
        "and AES-GCM or ChaCha20. Older versions than TLS 1.2 are refused in any case.",
        example="--ssl-ciphers ECDHE-RSA-AES256-GCM-SHA384",
    )
    enable_ssl_refresh: bool = flag(
        False,
        "Reads the certificates again when their files change; connections that are open keep theirs.",
        example="--ssl-keyfile key.pem --ssl-certfile cert.pem --enable-ssl-refresh",
    )
    uds: str | None = flag(
        None,
        "The path of a Unix domain socket to listen on instead of a network port. It makes --host and --port void.",
        example="--uds /run/ascend-vllm.sock",
    )
    log_config_file: str | None = flag(
        None,
        "A JSON file that configures the log, in the form of Python's logging.config.dictConfig.",
        example="--log-config-file logging.json",
    )
    disable_access_log_for_endpoints: str | None = flag(
        None,
        "The paths, separated by commas, for which no line is logged per HTTP request.",
        example="--disable-access-log-for-endpoints /health,/metrics",
    )
    root_path: str | None = flag(
        None,
        "The path under which a proxy in front of the server publishes it.",
        example="--root-path /llm",
    )
    h11_max_incomplete_event_size: int | None = flag(
        None,
        "The largest size of the head of an HTTP request, that is its address and its headers, in bytes. Without it "
        "4 MiB are allowed.",
        kind="length",
        example="--h11-max-incomplete-event-size 64K",
    )
    h11_max_header_count: int | None = flag(
        None,
        "The largest number of headers of an HTTP request. Without it 256 are allowed.",
        example="--h11-max-header-count 100",
    )
    max_body_bytes: int = flag(
        64 << 20,
        "The largest size of the body of an HTTP request in bytes; a larger one is refused with status 413. "
        "2M means 2 MiB.",
        kind="length",
        example="--max-body-bytes 2M",
    )
    max_sequences_per_request: int | None = flag(
        None,
        "The largest number of sequences that one request may ask for: its prompts, texts or conversations times n "
        "or best_of. Without it the environment variable VLLM_MAX_N_SEQUENCES says it, else it is 1024.",
        example="--max-sequences-per-request 64",
    )
    client_timeout_s: float = flag(
        60.0,
        "The seconds a client may take to send a request, with a second more for every 1000 bytes of it, and the "
        "seconds it may go without reading an answer that waits for it. After that the connection is closed.",
        example="--client-timeout-s 20",
    )

    max_concurrent_requests_per_key: int = flag(
        0,
        "The largest number of requests of one client that are answered at the same time; others are refused with "
        "status 429. A client is who shows one of the keys, or who has one address where there are no keys. 0 means "
        "any number.",
        example="--max-concurrent-requests-per-key 32",
    )
    shutdown_timeout: float = flag(
        20.0,
        "The seconds that open requests get to end when the server is told to stop. After that streams end with an "
        "error, and whole answers are refused with status 503.",
        example="--shutdown-timeout 60",
    )

    @property
    def sequence_limit(self) -> int:
        """Most sequences of a request, by flag, variable or default."""
        return self.max_sequences_per_request or envs.max_n_sequences() or DEFAULT_MAX_SEQUENCES

    def check(self) -> None:
        """Checks what can be known before anything is started.

        Raises:
            ConfigError: a value is wrong, or needs another flag.
            UnsupportedFlagError: a feature is asked for that does not exist.
        """
        most = self.max_sequences_per_request
        if most is not None and not 1 <= most <= _MAX_SEQUENCES:
            raise ConfigError(f"--max-sequences-per-request must be between 1 and {_MAX_SEQUENCES}, got {most}.")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be between 0 and 65535, got {self.port}.")
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise ConfigError(f"--ssl-cert-reqs must be 0, 1 or 2, got {self.ssl_cert_reqs}.")
        if self.ssl_cert_reqs and not self.ssl_ca_certs:
            raise ConfigError("--ssl-cert-reqs needs --ssl-ca-certs: whose certificates may clients show?")
        # without a certificate the server would answer everybody over plain HTTP; its file may hold the key too
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers", "enable_ssl_refresh"):
            if getattr(self, name) and not self.ssl_certfile:
                raise ConfigError(f"--{name.replace('_', '-')} needs --ssl-certfile.")
        self._check_limits()
        refuse_unsupported(type(self), vars(self))

    def _check_limits(self) -> None:
        for name in ("h11_max_incomplete_event_size", "h11_max_header_count", "max_body_bytes", "client_timeout_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} must be above 0, got {value}.")
        if self.max_concurrent_requests_per_key < 0:
            raise ConfigError(
                f"--max-concurrent-requests-per-key must not be negative, got {self.max_concurrent_requests_per_key}."
            )
        if not 0 <= self.shutdown_timeout < math.inf:
            raise ConfigError(f"--shutdown-timeout must not be negative, got {self.shutdown_timeout}.")


@dataclasses.dataclass
class GenerateServerArgs(HttpArgs):
    """Flags of `python -m ascend_vllm.entrypoints.api_server` beside the engine's."""

    SECTION: ClassVar[str] = "The /generate server"

    log_level: str = flag(
        "debug",
        "How much the HTTP part of the /generate server writes to its log.",
        choices=_LOG_LEVELS,
        example="--log-level info",
    )
    generate_format: str = flag(
        "vllm",
        "The form of requests and answers at /generate: vllm streams the prompt with all the text so far, mindie "
        "only the new text, with MindIE's ranges and errors.",
        choices=("vllm", "mindie"),
        example="--generate-format mindie",
    )


@dataclasses.dataclass
class FrontendArgs(HttpArgs):
    """Flags of the OpenAI server beside the engine's."""

    SECTION: ClassVar[str] = "OpenAI server"

    uvicorn_log_level: str = flag(
        "info",
        "How much the HTTP part of the server writes to its log.",
        choices=_LOG_LEVELS,
        example="--uvicorn-log-level warning",
    )
    allow_credentials: bool = flag(
        False, "Lets web pages from other sites send cookies and passwords with their requests."
    )
    allowed_origins: list[str] = flag(
        ["*"],
        "The web sites whose pages may call the server from a browser, as a JSON list.",
        kind="json_list",
        example="--allowed-origins '[\"https://example.com\"]'",
    )
    allowed_methods: list[str] = flag(
        ["*"],
        "The HTTP methods that pages of other web sites may use, as a JSON list.",
        kind="json_list",
        example="--allowed-methods '[\"POST\"]'",
    )
    allowed_headers: list[str] = flag(
        ["*"],
        "The HTTP headers that pages of other web sites may send, as a JSON list.",
        kind="json_list",
        example="--allowed-headers '[\"Authorization\"]'",
    )
    api_key: list[str] | None = flag(
        None,
        "A secret that requests must show in their Authorization header. It may be given several times; the "
        "environment variable VLLM_API_KEY wins over it.",
        kind="nullable_str",
        many=True,
        repeat=True,
        example="--api-key my-secret",
    )
    api_key_scope: str = flag(
        "all",
        "What needs the key when there is one: all means everything but /health, /ping, /version, /metrics and the "
        "page /docs, which asks for it; "
        "inference means only the routes under /v1, /v2, /inference and /invocations, as in vLLM.",
        choices=("all", "inference"),
        example="--api-key my-secret --api-key-scope inference",
    )
    lora_modules: list[LoRAModule] | None = flag(
        None,
        "LoRA adapters that are served beside the model, each as name=path or as a JSON object.",
        kind="lora_module",
        many=True,
        example="--lora-modules sql=/adapters/sql poems=/adapters/poems",
    )
    prompt_adapters: list[str] | None = flag(
        None,
        "Prompt adapters that are served beside the model, each as name=path.",
        kind="nullable_str",
        many=True,
        unsupported="prompt adapters are not available in this version",
    )
    chat_template: str | None = flag(
        None,
        "The Jinja template that turns chat messages into a prompt, as a file or as the template itself. Without "
        "it the template of the tokenizer is used.",
        example="--chat-template ./template.jinja",
    )
    chat_template_content_format: str = flag(
        "auto",
        "Whether the chat template gets the content of a message as plain text (string) or as a list of parts "
        "(openai); auto finds out what the template expects.",
        choices=("auto", "string", "openai"),
    )
    trust_request_chat_template: bool = flag(
        False,
        "Lets requests bring a chat template of their own. It runs in a sandbox, in a process beside the server that "
        "is ended after 3 seconds, or when it needs too much memory or writes too long a text; two of them run at a "
        "time, and others wait.",
    )
    response_role: str = flag(
        "assistant",
        "The role that answers of the chat endpoint carry.",
        kind="nullable_str",
        example="--response-role assistant",
    )
    middleware: list[str] = flag(
        [],
        "A function or class of your own that every HTTP request passes through, as module.name. It may be given "
        "several times.",
        kind="nullable_str",
        repeat=True,
        example="--middleware my_package.my_middleware",
    )
    return_tokens_as_token_ids: bool = flag(
        False,
        "Writes tokens in log-probabilities as token_id:N instead of as text, so that tokens that are not whole "
        "characters can be told apart.",
    )
    disable_frontend_multiprocessing: bool = flag(
        False,
        "Asks for the server and the engine in one process.",
        no_effect="the engine always runs in a process of its own, answers are the same",
    )
    enable_auto_tool_choice: bool = flag(
        False,
        "Lets the model decide on its own to call one of the tools that a chat request brings. It needs "
        "--tool-call-parser.",
        example="--enable-auto-tool-choice --tool-call-parser hermes",
    )
    tool_call_parser: str | None = flag(
        None,
        "The format in which the model writes tool calls: hermes (Hermes and Qwen2.5, also named qwen), internlm, "
        "llama3_json, mistral, qwen3_coder (also named qwen3_xml), or a name from --tool-parser-plugin.",
        kind="str",
        example="--enable-auto-tool-choice --tool-call-parser hermes",
    )
    tool_parser_plugin: str = flag(
        "",
        "A Python file with a parser of your own for tool calls. The name it registers can be given to "
        "--tool-call-parser.",
        example="--tool-parser-plugin my_parser.py --tool-call-parser my_format",
    )
    exclude_tools_when_tool_choice_none: bool = flag(
        False, "Leaves the tools out of the prompt when a request says that none may be called."
    )
    tool_server: str | None = flag(
        None,
        "The address of a server that carries out tool calls.",
        unsupported="clients carry out the calls themselves",
    )
    max_log_len: int | None = flag(
        None,
        "The largest number of characters or token ids of a prompt that --enable-log-requests writes to the log. "
        "Without it as much is written as a line of 8192 characters holds.",
        example="--max-log-len 100",
    )
    disable_fastapi_docs: bool = flag(
        False, "Turns off the pages at /docs, /redoc and /openapi.json that describe the HTTP interface."
    )
    disable_ui: bool = flag(
        False, "Turns off the page at /ui, where a browser chats with the model and watches the engine."
    )
    enable_prompt_tokens_details: bool = flag(
        False, "Adds to the usage of an answer how many tokens of the prompt came from the cache."
    )
    enable_force_include_usage: bool = flag(
        False, "Sends the token counts at the end of every stream, even when the request does not ask for them."
    )
    enable_cum_log_probs: bool = flag(False, "Adds the sum of log-probabilities to every choice of a completion.")
    default_chat_template_kwargs: dict[str, object] | None = flag(
        None, "Values that every chat template is given, as a JSON object."
    )
    enable_request_id_headers: bool = flag(False, "Adds the header X-Request-Id to every answer.")
    enable_server_load_tracking: bool = flag(
        False, "Counts the requests in progress at /load; without it the count stays 0."
    )
    enable_tokenizer_info_endpoint: bool = flag(
        False, "Publishes the settings of the tokenizer, its chat template among them, at /tokenizer_info."
    )
    disable_uvicorn_access_log: bool = flag(
        False, "Stops the line that is logged for every HTTP request with its path and status."
    )
    enable_log_outputs: bool = flag(
        False,
        "Writes the text of every answer to the log when it is complete. It needs --enable-log-requests.",
        example="--enable-log-outputs",
    )
    api_server_count: int = flag(
        1,
        "The number of processes that answer HTTP requests, at one address and with one engine. More than one helps "
        "where many short answers keep one process busy while the engine waits. 0 is the same as --headless.",
        example="--api-server-count 2",
    )
    headless: bool = flag(
        False,
        "Starts no API server. It may be given where --node-rank is above 0, and changes nothing there.",
        example="--headless",
    )
    sse_keep_alive_interval: float = flag(
        0.0,
        "The seconds after which a stream that has nothing to send yet sends a comment, so that a proxy does not "
        "close it. 0 means never.",
        example="--sse-keep-alive-interval 15",
    )

    def check(self) -> None:
        """Checks what can be known before anything is started.

        Raises:
            ConfigError: a value is wrong, or needs another flag.
            UnsupportedFlagError: a feature is asked for that does not exist.
        """
        if self.enable_auto_tool_choice and not self.tool_call_parser:
            raise ConfigError("Error: --enable-auto-tool-choice requires --tool-call-parser")
        if not 0 <= self.sse_keep_alive_interval < math.inf:
            raise ConfigError(f"--sse-keep-alive-interval must not be negative, got {self.sse_keep_alive_interval}.")
        if self.max_log_len is not None and self.max_log_len < 0:
            raise ConfigError(f"--max-log-len must not be negative, got {self.max_log_len}.")
        if self.headless and self.api_server_count > 1:
            raise ConfigError(
                f"--api-server-count={self.api_server_count} cannot be used with --headless (no API servers are "
                "started in headless mode)."
            )
        if self.api_server_count > 1 and envs.allow_runtime_lora_updating():
            raise ConfigError("VLLM_ALLOW_RUNTIME_LORA_UPDATING cannot be used with api_server_count > 1")
        super().check()
