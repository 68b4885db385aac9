"""The keys of providers that are told by their own form, wherever they stand; it knows no names and no context.

Forms read in gitleaks/gitleaks, config/gitleaks.toml@420a0f55 (1Password, age, Alibaba, Atlassian, AWS, Azure AD,
Databricks) and Yelp/detect-secrets, detect_secrets/plugins (telegram_token@1f255338, discord@d66a988a,
twilio@60dae848); the others are the prefixes by which the services' keys are known, not checked against a list. Lengths
are taken as least ones, so that longer keys are masked to their end.
"""

import re
from collections.abc import Iterator

from praison_agent_rl.transcripts.secret_values import looks_random

_WORD = "[A-Za-z0-9_-]"
_ALNUM = "[A-Za-z0-9]"
_HEX = "[A-Fa-f0-9]"
_KEYS: tuple[tuple[str, str, str], ...] = (
    # what it begins with, what follows, whose it is
    ("sk-", _WORD + "{16,}", "OpenAI, Anthropic, OpenRouter, DeepSeek, Langfuse"),
    ("csk-", _ALNUM + "{32,}", "Cerebras"),
    ("sk_(?:live|test|prod)_", _ALNUM + "{10,}", "Stripe, Clerk"),
    ("rk_(?:live|test|prod)_", _ALNUM + "{10,}", "Stripe"),
    ("sk_", _HEX + "{48,}", "ElevenLabs"),
    ("AIza", _WORD + "{30,}", "Google"),
    (r"ya29\.", _WORD + "{20,}", "Google"),
    ("GOCSPX-", _WORD + "{20,}", "Google"),
    ("A(?:KIA|SIA|BIA|CCA)", "[A-Z0-9]{16}", "AWS"),
    ("IQoJb3JpZ2luX2Vj", "[A-Za-z0-9+/=]{40,}", "AWS, a session"),
    ("gh[pousr]_", _ALNUM + "{30,}", "GitHub"),
    ("github_pat_", "[A-Za-z0-9_]{30,}", "GitHub"),
    ("gl(?:pat|rt|dt|ptt|oas|soat|ft|imt|agent|cbt|ffct)-", r"[A-Za-z0-9_.-]{16,}", "GitLab"),
    ("xox[a-z]-", "[A-Za-z0-9-]{10,}", "Slack"),
    ("xapp-", "[A-Za-z0-9-]{10,}", "Slack"),
    ("hf_", _ALNUM + "{30,}", "Hugging Face"),
    ("npm_", _ALNUM + "{30,}", "npm"),
    ("pypi-", _WORD + "{40,}", "PyPI"),
    ("rubygems_", _HEX + "{48,}", "RubyGems"),
    ("cio", _ALNUM + "{32}(?![A-Za-z0-9])", "crates.io"),
    ("dckr_(?:pat|oat)_", _WORD + "{20,}", "Docker"),
    ("gsk_", _ALNUM + "{30,}", "Groq"),
    ("xai-", _ALNUM + "{30,}", "xAI"),
    ("r8_", _ALNUM + "{30,}", "Replicate"),
    ("pplx-", _ALNUM + "{30,}", "Perplexity"),
    (r"tgp_v\d_", _WORD + "{30,}", "Together"),
    ("nvapi-", _WORD + "{30,}", "NVIDIA"),
    ("fw_", _ALNUM + "{22,}", "Fireworks"),
    ("pa-", _WORD + "{43}(?![A-Za-z0-9_-])", "Voyage"),
    ("jina_", _WORD + "{32,}", "Jina"),
    ("tvly-", _WORD + "{20,}", "Tavily"),
    ("fc-", _HEX + "{32}", "Firecrawl"),
    ("pcsk_", "[A-Za-z0-9_]{40,}", "Pinecone"),
    ("e2b_", _HEX + "{40}", "E2B"),
    ("esecret_", _ALNUM + "{20,}", "Anyscale"),
    ("lsv2_[a-z]{2}_", "[A-Za-z0-9_]{30,}", "LangSmith"),
    ("dapi", _HEX + r"{32}(?:-\d)?", "Databricks"),
    ("shp(?:at|ca|pa|ss)_", _HEX + "{32}", "Shopify"),
    ("do[opr]_v1_", _HEX + "{32,}", "DigitalOcean"),
    (r"SG\.", r"[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}", "SendGrid"),
    ("xkeysib-", _HEX + "{64}-[A-Za-z0-9]{16,}", "Brevo"),
    ("key-", _HEX + "{32}(?![A-Za-z0-9])", "Mailgun"),
    (_HEX + "{20}", _HEX + r"{12}-us\d{1,2}(?![A-Za-z0-9])", "Mailchimp"),
    ("(?:AC|SK)", "[0-9a-f]{32}(?![A-Za-z0-9])", "Twilio"),
    (r"(?:bot)?\d{5,16}:A", _WORD + "{33,35}(?![A-Za-z0-9_-])", "Telegram"),
    (r"[MNO][A-Za-z0-9_-]{22,27}\.[A-Za-z0-9_-]{6}\.", _WORD + "{27,}", "Discord"),
    (r"[A-Za-z0-9_~.]{3}\dQ~", "[A-Za-z0-9_~.-]{31,}", "Azure AD"),
    (_ALNUM + "{52}JQQJ99", _ALNUM + "{26}", "Azure OpenAI"),
    (r"hv[sbr]\.", _WORD + "{24,}", "HashiCorp Vault"),
    (_ALNUM + r"{14}\.atlasv1\.", _WORD + "{40,}", "Terraform"),
    ("gls?a_", r"[A-Za-z0-9]{32}_[A-Fa-f0-9]{8}", "Grafana"),
    ("glc_", "[A-Za-z0-9+/=]{32,}", "Grafana"),
    ("sntry[su]_", "[A-Za-z0-9+/=_-]{40,}", "Sentry"),
    ("sbp_", _HEX + "{40}", "Supabase"),
    ("sb_secret_", _WORD + "{20,}", "Supabase"),
    ("lin_(?:api|oauth)_", _ALNUM + "{32,}", "Linear"),
    ("ntn_", _ALNUM + "{40,}", "Notion"),
    ("secret_", _ALNUM + "{43}(?![A-Za-z0-9])", "Notion"),
    (r"pat[A-Za-z0-9]{14}\.", _HEX + "{64}", "Airtable"),
    ("fig[dou]h?_", _WORD + "{36,}", "Figma"),
    ("PMAK-", _HEX + "{24}-" + _HEX + "{34}", "Postman"),
    ("ATATT3", "[A-Za-z0-9_=-]{100,}", "Atlassian"),
    ("sq0[a-z]{3}-", _WORD + "{22,}", "Square"),
    ("EAAA", _WORD + "{56,}", "Square"),
    ("EAA", _ALNUM + "{100,}", "Meta"),
    (r"dp\.(?:pt|st|ct|sa|scim|audit)\.", "[A-Za-z0-9_.-]{40,}", "Doppler"),
    ("fo1_", _WORD + "{40,}", "Fly"),
    ("AQVN", _WORD + "{35,}", "Yandex"),
    ("LTAI", _ALNUM + "{12,}", "Alibaba"),
    ("NR(?:AK|JS|II|IQ)-", _ALNUM + "{20,}", "New Relic"),
    ("nfp_", _ALNUM + "{36,}", "Netlify"),
    ("vc[prka]_", _ALNUM + "{24,}", "Vercel"),
    ("pscale_(?:tkn|pw|oauth)_", r"[\w=.-]{32,}", "PlanetScale"),
    ("HRKU-", _WORD + "{36,}", "Heroku"),
    ("pul-", _HEX + "{40}", "Pulumi"),
    ("ops_eyJ", "[A-Za-z0-9+/=_-]{100,}", "1Password"),
    ("AGE-SECRET-KEY-1", "[A-Z0-9]{58}", "age"),
)
_STARTS = "|".join(start for start, _, _ in _KEYS)
_KEY = re.compile("|".join(f"(?:{start}){rest}" for start, rest, _ in _KEYS))
_BEGINS = re.compile(rf"[\n.:~-][nrt]?(?P<key>(?:{_STARTS})[^\n]{{8,}})".encode())
"""The beginning of a key in a list of words."""
_NOT_OF_WORDS = bytes(c if (chr(c).isalnum() and c < 128) or chr(c) in "_.:~-" else 10 for c in range(256))
_INSIDE = re.compile(r".?[A-Za-z0-9_](?<!\\[nrt])", re.DOTALL)
_SHORTEST = 16
"""Characters; each key holds so long a word."""


LONG_WORD = re.compile(f"[A-Za-z0-9_.:~-]{{{_SHORTEST}}}")
"""In a text without one is no key."""


def provider_keys(text: str, lowered: str) -> Iterator[tuple[int, int]]:
    """Where the keys stand. Texts without long words, and words that no key begins with, cost next to nothing."""
    words = text.encode("utf-8", "replace").translate(_NOT_OF_WORDS).split()
    long_words = b"\n".join([word for word in words if len(word) >= _SHORTEST])
    place = 0
    for begins in _BEGINS.finditer(b"\n" + long_words):
        # words come in the order of the text: one walk through it finds them all
        place = _next_place(text, begins["key"].decode("ascii"), place)
        match = _KEY.match(text, place)
        if match and looks_random(match[0]):
            yield place + 3 * match[0].startswith("bot"), match.end()
            place = match.end()


def _next_place(text: str, key: str, place: int) -> int:
    r"""Where ``key`` stands next with no letter before it, but that of an escape such as ``\n``."""
    while (found := text.find(key, place)) >= 0:
        if not _INSIDE.fullmatch(text[max(0, found - 2) : found]):
            return found
        place = found + 1
    return len(text)
