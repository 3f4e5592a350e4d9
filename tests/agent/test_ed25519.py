"""Ed25519 by RFC 8032: its own examples, and everything that must not verify."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.identity.ed25519 import (
    BASE,
    IDENTITY,
    L,
    P,
    add,
    decode_point,
    double,
    encode_point,
    equal,
    multiply,
    verifies,
)
from testbed.access.signing import SigningKey

# RFC 8032 section 7.1: secret, public, text, signature
EXAMPLES = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
    (  # the text is SHA-512 of "abc"
        "833fe62409237b9d62ec77587520911e9a759cec1d19755b7da901b96dca3d42",
        "ec172b93ad5e563bf4932c70e1245034c35467ef2efd4d64ebf819683467e2bf",
        "ddaf35a193617abacc417349ae20413112e6fa4e89a97ea20a9eeee64b55d39a2192992a274fc1a836ba3c23a3feebbd454d4423643ce80e2a9ac94fa54ca49f",
        "dc2a4459e7369633a52b1bf277839a00201009a3efbf3ecb69bea2186c26b58909351fc9ac90b3ecfdfbc7c66431e0303dca179c138ac17ad9bef1177331a704",
    ),
]
SMALL_ORDER = [  # the canonical encodings of the eight points whose order divides 8
    "0100000000000000000000000000000000000000000000000000000000000000",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000080",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa",
]
KEY = SigningKey(bytes(range(32)))


@pytest.mark.parametrize(("secret", "public", "text", "signature"), EXAMPLES)
def test_the_examples_of_the_rfc_hold_and_any_change_breaks_them(
    secret: str, public: str, text: str, signature: str
) -> None:
    key, said, signed = bytes.fromhex(public), bytes.fromhex(text), bytes.fromhex(signature)
    assert SigningKey(bytes.fromhex(secret)).public == key
    assert SigningKey(bytes.fromhex(secret)).sign(said) == signed
    assert verifies(key, said, signed)
    assert not verifies(key, said + b"x", signed)
    for at in (0, 31, 32, 63):
        assert not verifies(key, said, signed[:at] + bytes([signed[at] ^ 1]) + signed[at + 1 :])
    assert not verifies(bytes([key[0] ^ 1]) + key[1:], said, signed)


def test_another_form_of_the_same_signature_is_refused() -> None:
    """S + L satisfies the equation too: if accepted, one signature could be written in several ways."""
    signature = KEY.sign(b"text")
    s = int.from_bytes(signature[32:], "little")
    assert verifies(KEY.public, b"text", signature)
    assert not verifies(KEY.public, b"text", signature[:32] + (s + L).to_bytes(32, "little"))


@pytest.mark.parametrize("encoded", SMALL_ORDER)
def test_a_key_of_small_order_signs_nothing(encoded: str) -> None:
    """With the neutral element as the key, R = S B satisfies the equation for every text."""
    key = bytes.fromhex(encoded)
    point = decode_point(key)
    assert point is not None
    assert equal(multiply(8, point), IDENTITY)
    for scalar in (0, 1, 7):
        forged = encode_point(multiply(scalar, BASE)) + scalar.to_bytes(32, "little")
        assert not verifies(key, b"any text", forged)


def test_an_encoding_that_is_not_canonical_or_off_the_curve_is_no_point() -> None:
    assert decode_point((P + 1).to_bytes(32, "little")) is None  # the neutral element, not canonical
    assert decode_point((2**255 - 1).to_bytes(32, "little")) is None
    assert decode_point((1 | 1 << 255).to_bytes(32, "little")) is None  # x = -0
    assert decode_point((2).to_bytes(32, "little")) is None  # no x fits this y
    for size in (0, 31, 33):
        assert not verifies(b"\1" * size, b"", b"\0" * 64)
        assert not verifies(KEY.public, b"", b"\0" * (size + 32))


def test_points_form_a_group() -> None:
    assert equal(multiply(L, BASE), IDENTITY)
    assert equal(multiply(5, BASE), add(double(double(BASE)), BASE))
    assert equal(add(BASE, BASE), double(BASE))
    assert decode_point(encode_point(BASE)) == BASE


@pytest.mark.slow
@given(st.binary(max_size=64), st.binary(min_size=64, max_size=64))
def test_what_was_signed_verifies_and_noise_does_not(text: bytes, noise: bytes) -> None:
    assert verifies(KEY.public, text, KEY.sign(text))
    assert not verifies(KEY.public, text, noise)
