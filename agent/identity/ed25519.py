"""Ed25519 signature verification (no signing), after RFC 8032 section 5.1.

Pure Python, because a phone has no compiler and nothing installed there verifies Ed25519: neither the standard library
nor pyzmq (it exposes libsodium for CURVE keys only). One verification takes about 3 ms on a laptop-class core, and an
update needs one. Verification handles public values only, so timing leaks nothing.

Stricter than the RFC where that costs nothing: it refuses non-canonical encodings (S >= L, y >= p, a negative zero) and
public keys of small order, under which one signature fits many texts. It checks the equation without the cofactor.
"""

from __future__ import annotations

import hashlib

KEY_BYTES, SIGNATURE_BYTES = 32, 64

P = 2**255 - 19
L = 2**252 + 27742317777372353535851937790883648493  # order of the base point
D = -121665 * pow(121666, -1, P) % P
ROOT_OF_MINUS_1 = pow(2, (P - 1) // 4, P)

Point = tuple[int, int, int, int]  # extended coordinates X, Y, Z, T: x = X/Z, y = Y/Z, x y = T/Z
IDENTITY: Point = (0, 1, 1, 0)


def verifies(public: bytes, text: bytes, signature: bytes) -> bool:
    """True if this key signed this text. False for anything malformed."""
    if len(public) != KEY_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    key, s = decode_point(public), int.from_bytes(signature[32:], "little")
    if key is None or s >= L or equal(multiply(8, key), IDENTITY):
        return False
    k = int.from_bytes(hashlib.sha512(signature[:32] + public + text).digest(), "little") % L
    x, y, z, t = key
    # R = s B - k A; comparing encodings also refuses a non-canonical R
    return encode_point(add(multiply(s, BASE), multiply(k, (P - x, y, z, P - t)))) == signature[:32]


def add(one: Point, other: Point) -> Point:
    """RFC 8032 section 5.1.4. The formula is complete, so it also doubles."""
    x1, y1, z1, t1 = one
    x2, y2, z2, t2 = other
    a, b = (y1 - x1) * (y2 - x2) % P, (y1 + x1) * (y2 + x2) % P
    c, d = 2 * t1 * t2 * D % P, 2 * z1 * z2 % P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % P, g * h % P, f * g % P, e * h % P


def double(point: Point) -> Point:
    x, y, z, _ = point
    a, b, c = x * x % P, y * y % P, 2 * z * z % P
    h = a + b
    e, g = h - (x + y) ** 2 % P, a - b
    f = c + g
    return e * f % P, g * h % P, f * g % P, e * h % P


def multiply(scalar: int, point: Point) -> Point:
    """Double-and-add from the highest bit. Not constant time."""
    result = IDENTITY
    for bit in bin(scalar)[2:]:
        result = double(result)
        if bit == "1":
            result = add(result, point)
    return result


def equal(one: Point, other: Point) -> bool:
    x1, y1, z1, _ = one
    x2, y2, z2, _ = other
    return (x1 * z2 - x2 * z1) % P == 0 and (y1 * z2 - y2 * z1) % P == 0


def encode_point(point: Point) -> bytes:
    x, y, z, _ = point
    inverse = pow(z, -1, P)
    x, y = x * inverse % P, y * inverse % P
    return (y | (x & 1) << 255).to_bytes(32, "little")


def decode_point(encoded: bytes) -> Point | None:
    """RFC 8032 section 5.1.3. None if this is not the canonical encoding of a point on the curve."""
    number = int.from_bytes(encoded, "little")
    sign, y = number >> 255, number & ((1 << 255) - 1)
    if y >= P:
        return None
    u, v = (y * y - 1) % P, (D * y * y + 1) % P
    x = u * pow(v, 3, P) * pow(u * pow(v, 7, P), (P - 5) // 8, P) % P  # a square root of u/v, if there is one
    if v * x * x % P == P - u and u:
        x = x * ROOT_OF_MINUS_1 % P
    if v * x * x % P != u or (x == 0 and sign):
        return None
    if x & 1 != sign:
        x = P - x
    return x, y, 1, x * y % P


def _base() -> Point:
    found = decode_point((4 * pow(5, -1, P) % P).to_bytes(32, "little"))
    assert found is not None
    return found


BASE = _base()
