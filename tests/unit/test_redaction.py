"""Secrets are masked in whatever form they come, and what is no secret stays as it was."""

import base64
import doctest
import json
import random
import re
import string
import sys
import time
from types import SimpleNamespace

import pytest

from praison_agent_rl.errors import ConfigError, MissingExtra
from praison_agent_rl.transcripts import redaction, secret_values
from praison_agent_rl.transcripts.plain_values import plain, revive
from praison_agent_rl.transcripts.redaction import Redactor, find_redactor, mask_personal, mask_secrets, redact_value

ALNUM = string.ascii_letters + string.digits
HEX = string.digits + "abcdef"


def planted_secrets() -> dict[str, list[tuple[str, str]]]:
    """Texts by kind, each with the secret in it; made here, so that no scanner of this repository finds any."""
    chance = random.Random(7)

    def made(prefix: str, length: int, letters: str = ALNUM) -> str:
        return prefix + "".join(chance.choice(letters) for _ in range(length))

    openai, project, anthropic = made("sk-", 48), made("sk-proj-", 120, ALNUM + "-_"), made("sk-ant-api03-", 93)
    aws, aws_secret = made("AKIA", 16, string.ascii_uppercase + string.digits), made("wJ7/", 36, ALNUM + "/")
    jwt = f"{made('eyJ', 33)}.{made('eyJ', 80)}.{made('', 43, ALNUM + '-_')}"
    body = [made("", 64, ALNUM + "+/") for _ in range(4)]
    pem = "\n".join(["-----BEGIN RSA PRIVATE KEY-----", *body, made("", 20), "-----END RSA PRIVATE KEY-----"])
    basic, azure = base64.b64encode(b"aladdin:opensesame").decode(), made("", 86) + "=="
    slack, github = made("xoxb-", 11, string.digits) + made("-", 24), made("ghp_", 36)
    bearer, opaque, word = made("", 40, HEX), made("", 32), "correcthorse7"
    return {
        "OpenAI": [
            (f"Use {openai} for that", openai),
            (f"OPENAI_API_KEY={project}", project),
            (f'client = OpenAI(api_key="{openai}")', openai),
        ],
        "Anthropic": [(f"export ANTHROPIC_API_KEY={anthropic}\n", anthropic), (f"({anthropic}),", anthropic)],
        "Google": [(f"https://maps.example/api?key={(google := made('AIza', 35, ALNUM + '-_'))}&q=x", google)],
        "AWS": [
            (f"aws_access_key_id = {aws}\naws_secret_access_key = {aws_secret}", aws),
            (f"aws_access_key_id = {aws}\naws_secret_access_key = {aws_secret}", aws_secret),
            (f"{aws} {aws_secret}", aws_secret),
            (json.dumps({"SecretAccessKey": aws_secret}), aws_secret),
        ],
        "GitHub": [
            (f"git clone https://{github}@github.com/a/b", github),
            (f"token {(fine := made('github_pat_', 82, ALNUM + '_'))}", fine),
            (f"{(oauth := made('gho_', 36))}", oauth),
        ],
        "Slack": [(f"slack says {slack}.", slack), (f'{{"token":"{slack}"}}', slack)],
        "Hugging Face": [(f"HF_TOKEN={(hf := made('hf_', 34))}", hf), (f"login('{hf}')", hf)],
        "Stripe": [(f"stripe.api_key = '{(stripe := made('sk_live_', 24))}'", stripe), (f"<{stripe}>", stripe)],
        "JWT": [(f"cookie: session={jwt}; Path=/", jwt), (f"id={jwt}", jwt.split(".")[2])],
        "headers": [
            (f"Authorization: Bearer {bearer}", bearer),
            (f"curl -H 'authorization: bearer {opaque}' https://x.example", opaque),
            (json.dumps({"Authorization": f"Token {bearer}"}), bearer),
            (json.dumps(json.dumps({"headers": {"Authorization": f"Bearer {opaque}"}})), opaque),
            (f"Authorization: Basic {basic}", basic),
            (f"send 'Basic {basic}'", basic),
            (f"X-Api-Key: {opaque}", opaque),
        ],
        "URLs": [
            (f"postgres://admin:{word}@db.example:5432/app", word),
            ("redis://:p%40ssw0rd@cache:6379", "p%40ssw0rd"),
            ("amqp://guest:se@cret@mq/", "se@cret"),
        ],
        "private keys": [
            (f"key:\n{pem}\nend", body[0]),
            (json.dumps({"private_key": pem}), body[2]),
            (json.dumps(json.dumps({"key": pem})), body[3]),
            (pem[:250], body[1]),
        ],
        "assignments": [
            (f"password: {word}", word),
            (f'{{"password": "{word}"}}', word),
            (json.dumps(json.dumps({"db_password": word})), word),
            (f"DB_PASSWORD='{word}'", word),
            ("DB_PASSWORD=correcthorsebattery", "correcthorsebattery"),
            ("docker run -e MY_SECRET=correcthorsebatter app", "correcthorsebatter"),
            ("passphrase = 'correct horse battery staple'", "correct horse battery staple"),
            ('password: str = "hunterstwo"', "hunterstwo"),
            ("mysql --password hunter2andmore db", "hunter2andmore"),
            (f"https://x.example/?access_token={opaque}", opaque),
            (f"curl -u admin:{word} https://x.example", word),
            ("My password is this, Password: 48151623", "48151623"),
        ],
        "npm": [(f"//registry.npmjs.org/:_authToken={(npm := made('npm_', 36))}", npm)],
        "Azure": [
            (f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={azure};EndpointSuffix=x", azure),
            ("Server=tcp:db;User ID=app;Password=correcthorse;Encrypt=true", "correcthorse"),
            (f"https://a.blob.example/c?sv=2024&sig={(sig := made('', 43))}%3D", sig),
        ],
        "others": [
            (made_text, made_text.split()[-1])
            for made_text in [
                f"use {made('gsk_', 52)}",
                f"use {made('glpat-', 20, ALNUM)}",
                f"use {made('pypi-AgEIcHlwaS5vcmc', 60)}",
                f"use {made('xai-', 60)}",
                f"use {made('whsec_', 32)}",
                f"use {made('r8_', 37)}",
            ]
        ],
    }


PLANTED = [(kind, text, secret) for kind, cases in planted_secrets().items() for text, secret in cases]


def test_there_are_forty_secrets_of_twelve_kinds() -> None:
    assert len(PLANTED) >= 40 and len({kind for kind, _, _ in PLANTED}) >= 12


@pytest.mark.parametrize(("kind", "text", "secret"), PLANTED)
def test_secrets_are_masked(kind: str, text: str, secret: str) -> None:
    assert secret in text or json.dumps(secret)[1:-1] in text
    masked = mask_secrets(text, {})
    assert secret not in masked and "<SECRET_1>" in masked


@pytest.mark.parametrize(("kind", "text", "secret"), PLANTED)
def test_secrets_are_masked_inside_long_texts_and_json(kind: str, text: str, secret: str) -> None:
    for around in (f"All of it.\n{text}\nAnd more.", json.dumps({"result": f"It says:\n{text}\n"})):
        assert secret not in mask_secrets(around, {})


def test_what_stands_around_a_secret_stays() -> None:
    assert mask_secrets("postgres://app:hunter22@db:5432/x", {}) == "postgres://app:<SECRET_1>@db:5432/x"
    assert mask_secrets('{"password": "hunter22", "user": "ann"}', {}) == '{"password": "<SECRET_1>", "user": "ann"}'
    assert mask_secrets("Authorization: Bearer abc123def456ghi789", {}) == "Authorization: Bearer <SECRET_1>"


def test_masking_what_is_masked_changes_nothing() -> None:
    for _, text, _ in PLANTED:
        once = mask_secrets(text, {})
        assert mask_secrets(once, {}) == once


@pytest.mark.parametrize(
    "text",
    [
        "The secret of good bread is patience: flour, water, salt and time.",
        "Forgot your password? The password must be at least 8 characters long.",
        "Password: required. Token: optional.",
        "The basic authentication-protocols of the bearer are described below: see chapter 3.",
        "She bears the bearer certificates-of-deposit; Asia and the AWS re:Invent keynote.",
        "id 123e4567-e89b-12d3-a456-426614174000 and UUID: 00000000-0000-0000-0000-000000000000",
        "commit 9eb463e2f0c1d5a7b8e9f00112233445566778899 (HEAD -> main)",
        "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "etag = d41d8cd98f00b204e9800998ecf8427e, Cache-Control: max-age=3600",
        "see https://example.org:8080/a/b?page=2&sort=key#part and http://localhost:8000/me@example",
        "def login(user: str, password: str, token: str | None = None) -> Session: ...",
        "self.password = password\napi_key = settings.api_key2.value\ntoken=tokens[0]\nsecret = get_secret2(name)",
        "api_key=os.environ['OPENAI_API_KEY'], password=${DB_PASSWORD}, token: <your token>",
        "usage: max_tokens=4096, completion_tokens: 128, total_tokens=5000, token_count = 1234567",
        "pip install scikit-learn sk-learn-contrib-packages-of-2024 task-1234567890123456789",
        'for key, value in items: key="temperature"; print(f"{key}={value}")',
        "PWD=/home/ann/project1 OLDPWD=/home/ann",
        "SECRET_KEY=get_random_secret_key()\nAPI_KEY=settings.api_key\nTOKEN=tokens[0]\nMAX_TOKENS=4096",
        "-----BEGIN CERTIFICATE-----\nMIIDdzCCAl+gAwIBAgIEAgAAuTANBgkqhkiG9w0BAQUFADBaMQsw\n-----END CERTIFICATE-----",
        "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk",
        "call_abc123DEF456ghi789JKL012 chatcmpl-9x8y7z6w5v4u3t2s1r0q toolu_01A09q90qw90lq917835lq9",
        '{"type": "object", "properties": {"password": {"type": "string"}, "api_key": {"type": "string"}}}',
        "from transformers import hf_hub_download; npm_config_registry; asia-northeast1",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert mask_secrets(text, {}) == text


PERSONAL = [
    ("write to Ann.Lee+test@mail.example.org today", "write to <EMAIL_1> today"),
    ("call +49 170 1234567 or (555) 123-4567, or 555-123-9999", "call <PHONE_1> or <PHONE_2>, or <PHONE_3>"),
    ("at 0170 1234567.", "at <PHONE_1>."),
    ("card 4111 1111 1111 1111, and 4111-1111-1111-1111", "card <CARD_1>, and <CARD_1>"),
    ("IBAN DE89 3704 0044 0532 0130 00 or DE89370400440532013000", "IBAN <IBAN_1> or <IBAN_2>"),
    ("from 203.0.113.9:443 and 2001:db8::1", "from <IP_1>:443 and <IP_2>"),
]


@pytest.mark.parametrize(("text", "expected"), PERSONAL)
def test_personal_data_is_masked(text: str, expected: str) -> None:
    assert mask_personal(text, {}) == expected


@pytest.mark.parametrize(
    "text",
    [
        "card 4111 1111 1111 1112",  # Luhn fails
        "DE89370400440532013001",  # the remainder is not 1
        "id 123e4567-e89b-12d3-a456-426614174000",
        "at 2024-05-06T12:34:56.789012+00:00, unix 1714999999.123456",
        "from http://127.0.0.1:8000, version 300.1.2.3 or 1.2.3",
        "std::vector<int>, 12:34:56, @decorator, a@b",
        "commit 9eb463e2f0c1d5a7b8e9f00112233445566778899",
        "pi is 3.14159265358979 and e 2.718281828459045",
    ],
)
def test_what_is_not_personal_stays(text: str) -> None:
    assert mask_personal(text, {}) == text


def test_data_after_an_escaped_new_line_is_masked_and_the_escape_stays() -> None:
    text = json.dumps("for\nann@mail.example\n+49 170 1234567\n203.0.113.9")
    assert mask_personal(text, {}) == '"for\\n<EMAIL_1>\\n<PHONE_1>\\n<IP_1>"'


def test_one_conversation_has_one_placeholder_for_a_value_in_all_its_forms() -> None:
    names: dict[str, str] = {}
    assert mask_personal("From a@b.example to c@d.example", names) == "From <EMAIL_1> to <EMAIL_2>"
    assert mask_personal("C@D.example wrote to a@b.example", names) == "<EMAIL_2> wrote to <EMAIL_1>"
    assert mask_personal("+49 170 1234567", names) == mask_personal("+49-170-1234567", names) == "<PHONE_1>"
    assert mask_personal("c@d.example", {}) == "<EMAIL_1>"


ADVERSARIAL = [
    *("a", "sk-", "eyJ", "eyJa.", "-----BEGIN PRIVATE KEY-----", "://", "://a:", "a@", "a.", "@a.", "password", "="),
    *("password=", 'password="', "password: ", "\\", '"\\', "secret_key", "Authorization: ", "bearer ", "basic "),
    *("A1" * 10 + " ", "4", "4 ", "+1 ", "DE89 ", "1.", "::", "a:", "AKIA", "?key", "x-token", "--token ", ";password"),
    *("curl -u a:", "PASSWORD", "\n", " ", "-", "A" * 15 + " ", "a-b_", "aws/AKIA ", "export ", "\u0130", "key: x "),
]


def slowness() -> float:
    """How many times as long as where the bounds were set this machine takes now, at least 1: by finding words."""
    text = "word " * 50_000

    def once() -> float:
        began = time.process_time()
        assert sum(match.end() > 0 for match in re.finditer(r"\w+", text)) == 50_000
        return time.process_time() - began

    return max(1.0, min(once() for _ in range(5)) / 0.01)  # measured there: 8 to 10 ms


@pytest.mark.parametrize("piece", ADVERSARIAL)
def test_a_megabyte_of_anything_takes_less_than_a_second(piece: str) -> None:
    """On the machine on which the bounds were set; on a slower one as much more."""
    text = (piece * (1_000_000 // len(piece) + 1))[:1_000_000]
    began = time.process_time()
    mask_secrets(text, {})
    assert time.process_time() - began < slowness(), "mask_secrets"
    began = time.process_time()
    mask_personal(text, {})
    assert time.process_time() - began < slowness(), "mask_personal"


def test_a_text_full_of_different_addresses_takes_linear_time() -> None:
    text = " ".join(f"ann{number}@mail.example" for number in range(40_000))
    began = time.process_time()
    assert mask_personal(text, {}).endswith("<EMAIL_40000>")
    assert time.process_time() - began < 2 * slowness()


HUGE = ["a", "key=", "-----BEGIN", "-----BEGIN PRIVATE KEY-----", "0123456789", 'password="', "api_key: ", "/a+b"]


@pytest.mark.parametrize("piece", HUGE)
def test_five_megabytes_of_the_worst_take_linear_time(piece: str) -> None:
    text = (piece * (5_000_000 // len(piece) + 1))[:5_000_000]
    began = time.process_time()
    find_redactor("personal")(text, {})
    assert time.process_time() - began < 20 * slowness()  # measured: 0.02 to 5 s


def quickest(text: str, redact: Redactor) -> float:
    def once() -> float:
        began = time.process_time()
        assert redact(text, {}) == text
        return time.process_time() - began

    return min(once() for _ in range(5))


@pytest.mark.parametrize("around", ["data:image/png;base64,{}", '{{"data": "{}", "format": "wav"}}', "{}"])
@pytest.mark.parametrize("redact", [mask_secrets, mask_personal])
def test_images_and_sound_are_passed_over(around: str, redact: Redactor) -> None:
    text = around.format(base64.b64encode(random.Random(3).randbytes(2_250_000)).decode())
    assert quickest(text, redact) < 0.03 * 3 * slowness()  # measured: 3 ms for each of the 3 MB


def test_ordinary_texts_cost_little() -> None:
    prose = "The quick brown fox jumps over the lazy dog, and then it goes to the forest: the others wait. " * 215
    assert quickest(prose[:20_000], mask_secrets) < 0.004  # measured: 0.5 ms


def test_what_stands_beside_a_long_run_is_masked_and_the_run_comes_back() -> None:
    image = base64.b64encode(random.Random(3).randbytes(30_000)).decode()
    text = f"password: hunter22 data:image/png;base64,{image} password: hunter33\n{image} token=abcdefgh12345678X"
    names: dict[str, str] = {}
    masked = mask_secrets(text, names)
    assert masked == (
        f"password: <SECRET_1> data:image/png;base64,{image} password: <SECRET_2>\n{image} token=<SECRET_3>"
    )
    assert list(names) == ["hunter22", "hunter33", "abcdefgh12345678X"]


LONG = "".join(random.Random(5).choices(ALNUM, k=6000)) + "End7"


@pytest.mark.parametrize("length", [290, 301, 1000, 2500, 6000])
@pytest.mark.parametrize(
    "form",
    [
        '{{"aws_session_token": "{}"}}',
        "AWS_SESSION_TOKEN={} ",
        "password='{}'",
        "password: {}\n",
        "--token {} x",
        "?access_token={}&x=1",
        "Server=a;Password={};x=y",
        "Authorization: Bearer {}",
        "https://ann:{}@host/x",
        "sk-{} is it",
        "eyJhbGciOiJIUzI1NiJ9.{}.c2lnbmF0dXJl",
        "<password>{}</password>",
        "Cookie: session={}",
    ],
)
def test_secrets_of_any_length_are_masked_to_their_end(form: str, length: int) -> None:
    secret = LONG[-length:]
    names: dict[str, str] = {}
    masked = mask_secrets(form.format(secret), names)
    assert "End7" not in masked and secret[:20] not in masked and "<SECRET_1>" in masked
    assert any(secret in known for known in names)


def in_json(value: object, times: int) -> str:
    for _ in range(times):
        value = json.dumps(value)
    return str(value)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "secret", ["Sup3rS3cret", "Sup3r'S3cret", 'Sup3r"S3cret', "*S3cret", "%S3cret", "$S3cret9", "[S3cret"]
)
@pytest.mark.parametrize("more", ["<S3cret", "envS3cret", "environment99", "pa,ss S3cret7", "a\\S3cret\\"])
def test_named_values_are_masked_in_json_within_json(secret: str, more: str, depth: int) -> None:
    masked = mask_secrets(in_json({"password": secret, "api_key": more, "user": "ann"}, depth), {})
    assert "S3cret" not in masked and "ment99" not in masked and "<SECRET_2>" in masked
    for _ in range(depth):
        masked = json.loads(masked)
    assert masked == {"password": "<SECRET_1>", "api_key": "<SECRET_2>", "user": "ann"}


DISCORD = "MTk4NjIyNDgzNDcxOTI1MjQ4.Cl2FMQ.ZnCjm1XVW7vRze4b7Cq4se7kKWs"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (f"discord_bot_token: {DISCORD}", DISCORD),
        (f"use {DISCORD}", DISCORD),
        ("password: abc,def123456", "abc,def123456"),
        ("password=pa$$w0rd123", "pa$$w0rd123"),
        ("Password: Tr0ub4dor&3xyz", "Tr0ub4dor&3xyz"),
        ("postgres://admin:pa/ssw0rd@db.example.com:5432/x", "pa/ssw0rd"),
        ("postgres://admin:pa?ssw0rd@db.example.com:5432/x", "pa?ssw0rd"),
        ("https://h/?password=correcthorse&x=1", "correcthorse"),
        ("DB_PASS=correcthorse", "correcthorse"),
        ("pass: S3cretPw99", "S3cretPw99"),
        ("**Password:** S3cretPw99", "S3cretPw99"),
        ("**Password**: `S3cretPw99`", "S3cretPw99"),
        ("Password: `correct`", "correct"),
        ("password\uff1aS3cretPw99", "S3cretPw99"),
        ("my password is Hunter2xyz9, thanks", "Hunter2xyz9"),
        ("<password>correct</password>", "correct"),
        ('<add key="ApiKey" value="abcDEF1234567890xyz"/>', "abcDEF1234567890xyz"),
        ('{"name":"DB_PASSWORD","value":"correct"}', "correct"),
        ('"{\\"name\\": \\"DB_PASSWORD\\", \\"value\\": \\"correct\\"}"', "correct"),
        ("sshpass -p S3cretPw99 ssh x", "S3cretPw99"),
        ("mysql -u root -pS3cretPw99 db", "S3cretPw99"),
        ("docker login -u me -p S3cretPw99", "S3cretPw99"),
        ("curl -uann:S3cretPw99 https://x", "S3cretPw99"),
        ("machine api.x.example login me password S3cretPw99", "S3cretPw99"),
        ("Cookie: a=b; sessionid=abcdef0123456789", "abcdef0123456789"),
        ("Set-Cookie: JSESSIONID=9A8B7C6D5E4F; Path=/", "9A8B7C6D5E4F"),
        ('{"auths":{"x":{"auth":"dXNlcjpwYXNzd29yZA=="}}}', "dXNlcjpwYXNzd29yZA=="),
        ("//r.example/:_auth=dXNlcjpwYXNzd29yZA==", "dXNlcjpwYXNzd29yZA=="),
        ("//r.example/:_authToken=abcdef01-2345-6789-abcd-ef0123456789", "abcdef01-2345-6789-abcd-ef0123456789"),
        ("secret access key: wJalrXUtnFEMIK7MDENGbPxRfiCY9", "wJalrXUtnFEMIK7MDENGbPxRfiCY9"),
        ("Api Key: abcDEF1234567890", "abcDEF1234567890"),
        ("consumerKey=abcDEF1234567890", "abcDEF1234567890"),
        ("Basic auth: Authorization: Basic YTpi", "YTpi"),
    ],
)
def test_named_secrets_are_masked_however_they_are_written(text: str, secret: str) -> None:
    names: dict[str, str] = {}
    for around in ("{}", "First.\n{}\nLast."):
        masked = mask_secrets(around.format(text), names)
        assert secret not in masked and "SECRET_1" in masked
        assert mask_secrets(masked, names) == masked


@pytest.mark.parametrize(
    "value",
    [
        "$NAME",
        "${NAME}",
        "<your-key>",
        "env.NAME",
        "os.environ['NAME2']",
        "%NAME%",
        "***",
        "{{ name1 }}",
        "[hidden]",
        "process.env.NAME1",
        "$(pass show x1)",
        "your-api-key-here",
        "YOUR_API_KEY_123",
        "sk-...",
        "<SECRET_1>",
        "%(name)s",
    ],
)
def test_references_and_placeholders_stay(value: str) -> None:
    for text in (f'password = "{value}"', f"api_key={value}", f"API_KEY={value}", json.dumps({"password": value})):
        assert mask_secrets(text, {}) == text
    assert redact_value({"password": value}, mask_secrets, {}) == {"password": value}


@pytest.mark.parametrize("begin", ["RSA PRIVATE KEY", "PRIVATE KEY", "PGP PRIVATE KEY BLOCK", "ENCRYPTED PRIVATE KEY"])
@pytest.mark.parametrize("line", ["", "> ", "    ", "# ", "| "])
@pytest.mark.parametrize("cut", [True, False])
def test_private_keys_are_masked_quoted_encrypted_and_cut_off(begin: str, line: str, cut: bool) -> None:
    headers = ["Proc-Type: 4,ENCRYPTED", "DEK-Info: AES-128-CBC,ABCDEF", ""]
    lines = [f"-----BEGIN {begin}-----", *headers, *[LONG[place : place + 64] for place in range(0, 640, 64)], "c7cut"]
    if not cut:
        lines.append(f"-----END {begin}-----")
    text = "\n".join(line + each for each in lines) + "\nGood bye."
    for form in (text, json.dumps(text), json.dumps(json.dumps(text))):
        masked = mask_secrets(form, {})
        assert not any(LONG[place : place + 16] in masked for place in range(640)) and "c7cut" not in masked
        assert "Good bye." in masked


def made(pattern: str) -> str:
    """A text of literals and of {kind length}: x hexadecimal, d digits, u capitals and digits, a any of both."""
    chance = random.Random(pattern)
    letters = {"x": HEX, "d": string.digits[1:], "u": string.ascii_uppercase + string.digits, "a": ALNUM}
    return re.sub(r"\{(\w)(\d+)\}", lambda m: "".join(chance.choices(letters[m[1]], k=int(m[2]))), pattern)


PROVIDERS = [
    "{d10}:AA{a33}", "SK{x32}", "AC{x32}", "M{a25}.{a6}.{a38}", "glrt-{a20}", "gldt-{a20}", "glptt-{x40}",
    "{a3}8Q~{a34}", "hvs.{a90}", "glsa_{a32}_{x8}", "glc_{a60}", "sntrys_{a60}", "sbp_{x40}", "dckr_pat_{a27}",
    "lin_api_{a40}", "ntn_{a46}", "secret_{a43}", "pat{a14}.{x64}", "figd_{a40}", "PMAK-{x24}-{x34}",
    "ATATT3xFfGF0{a170}", "sq0atp-{a22}", "EAAA{a60}", "key-{x32}", "tvly-{a32}", "tvly-dev-{a32}", "fc-{x32}",
    "pcsk_{a60}", "jina_{a60}", "sk_{x48}", "csk-{x48}", "dp.pt.{a43}", "{a14}.atlasv1.{a67}", "fo1_{a43}",
    "LTAI{a20}", "gsk_{a52}", "pplx-{a48}", "xai-{a80}", "r8_{a37}", "tgp_v1_{a43}", "sk-or-v1-{x64}",
    "dop_v1_{x64}", "shpat_{x32}", "NRAK-{u27}", "dapi{x32}", "nfp_{a36}", "pscale_tkn_{a43}", "HRKU-{a60}",
    "pul-{x40}", "rubygems_{x48}", "xkeysib-{x64}-{a16}", "{x32}-us12", "AGE-SECRET-KEY-1{u58}", "ya29.a0{a150}",
]  # fmt: skip


@pytest.mark.parametrize("form", PROVIDERS)
def test_keys_of_providers_are_known_when_they_stand_alone(form: str) -> None:
    key = made(form)
    for around in ("Please use {} for it.", "{}", "one\n{}\ntwo", "it's ({}), see", '{{"x": "{}"}}', "\u4f7f\u7528{}"):
        masked = mask_secrets(around.format(key), {})
        assert masked == around.format("<SECRET_1>")
    assert mask_secrets(json.dumps(f"first\n{key}\n"), {}) == '"first\\n<SECRET_1>\\n"'


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("https://api.telegram.org/bot{d9}:AA{a33}/getMe", "https://api.telegram.org/bot<SECRET_1>/getMe"),
        ("https://hooks.slack.com/services/T{u8}/B{u8}/{a24}", "https://hooks.slack.com/services/<SECRET_1>"),
        ("https://discord.com/api/webhooks/{d18}/{a68}", None),
        ("https://{x40}@github.com/x/y.git", "https://<SECRET_1>@github.com/x/y.git"),
        ("FlyV1 fm2_{a100}", "<SECRET_1>"),
    ],
)
def test_keys_in_urls_are_known(url: str, masked: str | None) -> None:
    text = made(url)
    assert mask_secrets(text, {}) == (masked or text.rpartition("/")[0] + "/<SECRET_1>")


@pytest.mark.parametrize(
    "text",
    [
        "aws docs sha1 2fd4e1c67A2d28fced849ee1bb76e7391b93eb12",
        "AWS s3://bucket/data/FooBar/2024/ReportQuarter1FinalVersion2/x",
        "AWS data/FooBar/2024/ReportQuarterOneFinalVersio",
        "https://example.com/path?key=summer2024sale",
        "https://video.example/watch?v=dQw4w9WgXcQ&key=chapter12x",
        "PUBLIC_KEY=abc123def",
        '{"public_key": "abc123def456"}',
        "export PWD=home1/user1 OLDPWD=home2",
        "api_key='your-api-key-here'",
        "AWS_ACCESS_KEY_NAME=deploy1 SECRET_NAME=database1 TOKENIZERS_PARALLELISM=false1",
        "bypass=abc123def compass: north12",
        "http://localhost:8080/@foo https://host:443/a@b https://en.example/wiki/File:Foo@2x.png",
        "token: str, password: string, cookies: none, Cookie: yes, author: Ann2, basic auth: on",
    ],
)
def test_what_only_resembles_a_secret_stays(text: str) -> None:
    assert mask_secrets(text, {}) == text


@pytest.mark.parametrize(
    "text",
    [
        "version 1.2.3.4, v1.22.33.4, package==1.2.3.4",
        "2 3 5 7 11 13 17 19 23 29 31",
        "4 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1",
        "1111 1111 1111 1111",
        "0612 3456 78 ms, 123 456 7890 items",
    ],
)
def test_numbers_of_other_things_are_not_personal(text: str) -> None:
    assert mask_personal(text, {}) == text


@pytest.mark.parametrize(
    "text",
    [
        "4539 1488 0343 6467",
        "4111111111111111",
        "3782 822463 10005",
        "5555-5555-5555-4444",
        "6011111111111117",
        "2223003122003222",
    ],
)
def test_numbers_that_issuers_give_are_cards(text: str) -> None:
    assert mask_personal(f"It is {text}.", {}) == "It is <CARD_1>."


@pytest.mark.parametrize(
    "value",
    [
        {"password": 99887766},
        {"password": b"99887766"},
        {"passwords": ["99887766"]},
        {"password": ("99887766",)},
        {"password": {"value": "99887766"}},
        {"db_password_prod": "99887766"},
        {"access token": "99887766"},
        {1: 2, "password": "99887766"},
        {"$x": 1, "api_key": "99887766"},
        {"a": [{"password": {"current": ["99887766"]}}]},
        {"name": "DB_PASSWORD", "value": "99887766"},
        {"headers": {"Authorization": "99887766"}},
        {"headers": {"authorization": "Bearer 99887766"}},
        {"Cookie": "sid=99887766"},
        {"auth": ["ann", "99887766"]},
        {"auth": "dXNlcjo5OTg4Nzc2Ng=="},
    ],
)
def test_structured_values_under_secret_names_are_masked(value: object) -> None:
    masked = json.dumps(redact_value(plain(value), mask_secrets, {}))
    for secret in ("99887766", base64.b64encode(b"99887766").decode(), "dXNlcjo5OTg4Nzc2Ng=="):
        assert secret not in masked
    revive(json.loads(masked))


@pytest.mark.parametrize(
    "value",
    [
        {"api_key": {"type": "string", "description": "The key of the API"}, "password": None, "token": True},
        {"usage": {"total_tokens": 12345678, "max_tokens": 4096}, "session_tokens": 5000, "PWD": "/home/ann"},
        {"name": "get_token", "value": "12", "auth": {"type": "basic"}, "public_key": "ssh-rsa AAAA"},
    ],
)
def test_structured_values_under_other_names_stay(value: object) -> None:
    assert redact_value(plain(value), mask_secrets, {}) == value


# --- values and redactors of others ---------------------------------------------------------------------------------


def test_every_text_of_a_value_is_masked_with_the_names_of_its_keys_in_view() -> None:
    value = {
        "role": "tool",
        "password": "correct horse",
        "api_key": {"type": "string"},
        "ann@mail.example": [1, None, {"to": "ann@mail.example"}],
        "raw": {"$bytes": base64.b64encode(b"ann@mail.example").decode()},
        "image": {"$bytes": "/////w=="},
    }
    masked = redact_value(value, find_redactor("personal"), {})
    assert masked == {
        "role": "tool",
        "password": "<SECRET_1>",
        "api_key": {"type": "string"},
        "<EMAIL_1>": [1, None, {"to": "<EMAIL_1>"}],
        "raw": {"$bytes": base64.b64encode(b"<EMAIL_1>").decode()},
        "image": {"$bytes": "/////w=="},
    }


def shout(text: str) -> str:
    return text.upper()


def hide_ann(text: str, names: dict[str, str]) -> str:
    return text.replace("Ann", names.setdefault("Ann", "<PERSON_1>"))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (None, "Ann: password: <SECRET_1>, a@b.example"),
        ("personal", "Ann: password: <SECRET_1>, <EMAIL_1>"),
        (shout, "ANN: PASSWORD: <SECRET_1>, A@B.EXAMPLE"),
        (f"{__name__}:shout", "ANN: PASSWORD: <SECRET_1>, A@B.EXAMPLE"),
        (f"{__name__}:hide_ann", "<PERSON_1>: password: <SECRET_1>, a@b.example"),
    ],
)
def test_a_redactor_is_found_and_secrets_are_masked_by_each(spec: object, expected: str) -> None:
    assert find_redactor(spec)("Ann: password: hunter22, a@b.example", {}) == expected


@pytest.mark.parametrize("spec", ["persnal", "", 7, "no_such_module:f", f"{__name__}:nothing", f"{__name__}:ALNUM"])
def test_a_redactor_that_is_not_there_is_named(spec: object) -> None:
    with pytest.raises(ConfigError, match="redact="):
        find_redactor(spec)


def test_a_redactor_has_to_give_a_text() -> None:
    with pytest.raises(TypeError, match="gave NoneType"):
        find_redactor(lambda text: None)("a text", {})


def with_presidio(monkeypatch: pytest.MonkeyPatch, *findings: tuple[str, str, float], model: bool = True) -> None:
    """A stand-in that finds texts: (text, kind, score)."""

    class Engine:
        def analyze(self, text: str, language: str) -> list[SimpleNamespace]:
            return [
                SimpleNamespace(start=place, end=place + len(sought), entity_type=kind, score=score)
                for sought, kind, score in findings
                for place in range(len(text))
                if text.startswith(sought, place)
            ]

    monkeypatch.setitem(sys.modules, "presidio_analyzer", SimpleNamespace(AnalyzerEngine=Engine))
    monkeypatch.setitem(sys.modules, "spacy", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "spacy.util", SimpleNamespace(is_package=lambda name: model))


def test_presidio_is_an_extra_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "presidio_analyzer", None)
    with pytest.raises(MissingExtra, match=r"praison-agent-rl\[presidio\]"):
        find_redactor("presidio")


def test_presidio_without_its_language_model_downloads_nothing_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with_presidio(monkeypatch, model=False)
    with pytest.raises(MissingExtra, match="python -m spacy download en_core_web_lg"):
        find_redactor("presidio")


def test_presidio_masks_what_it_finds_with_one_placeholder_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    with_presidio(monkeypatch, ("Ann", "PERSON", 0.8))
    assert find_redactor("presidio")("Ann and Ann", {}) == "<PERSON_1> and <PERSON_1>"


def test_of_findings_that_overlap_presidio_masks_the_surest(monkeypatch: pytest.MonkeyPatch) -> None:
    # what presidio 2.2 finds in this text, with these scores
    with_presidio(monkeypatch, ("ann@example.org", "EMAIL_ADDRESS", 1.0), ("example.org", "URL", 0.5))
    masked = find_redactor("presidio")("mail ann@example.org, see example.org", {})
    assert masked == "mail <EMAIL_ADDRESS_1>, see <URL_1>"


def test_examples_in_docstrings_hold() -> None:
    for module in (redaction, secret_values):
        assert doctest.testmod(module).failed == 0


# --- texts that are not searched ------------------------------------------------------------------------------------


def test_a_text_is_passed_over_only_where_no_rule_finds_anything_in_it() -> None:
    """`may_hold_secrets` spares the rules most texts; here they are all asked, of texts with and without secrets."""
    from praison_agent_rl.transcripts.secret_patterns import SECRET_RULES, may_hold_secrets

    pieces = [piece for texts in planted_secrets().values() for text, _ in texts for piece in (text, text[::2])]
    chance = random.Random(5)
    words = ["the", "fox", "jumps", "over", "a", "monkey", "in", "2026", "\u0130stanbul", "x-y", "{}", "is", ": ", "\n"]
    pieces += [" ".join(chance.choice(words) for _ in range(chance.randrange(30))) for _ in range(500)]
    passed = [text for text in pieces if not may_hold_secrets(text)]
    assert len(passed) > 100
    for text in passed:
        assert [list(rule.find(text, redaction._lower(text))) for rule in SECRET_RULES] == [[]] * len(SECRET_RULES)
