//! The secret that only the processes of a world know, and the proof by which one process shows another that it knows
//! it.
//!
//! The secret itself is never sent. Both sides of a connection send their own random number, and each message of a
//! handshake carries HMAC-SHA256 over its role, both numbers and its text. So a proof is worthless on another
//! connection, in the other direction, or with another text.

use std::fmt;
use std::io;

use hmac::{Hmac, Mac};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use crate::env::Env;
use crate::error::{LaunchError, refuse};

/// The environment variable that holds a world's secret.
pub const WORLD_SECRET: &str = "MOE_WORLD_SECRET";

/// The shortest allowed secret. A proof can be tested against guesses, so a short secret could be found.
const MIN_LEN: usize = 16;

/// A random number of one side, or the identity of a world.
pub(super) type Nonce = [u8; 32];

/// The secret that all processes of a world know. It is never printed.
#[derive(Clone)]
pub struct WorldSecret(String);

impl fmt::Debug for WorldSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WorldSecret(..)")
    }
}

impl WorldSecret {
    /// A new secret of 256 random bits.
    ///
    /// # Errors
    /// The system provides no random numbers.
    pub fn random() -> io::Result<Self> {
        Ok(Self(nonce()?.iter().map(|byte| format!("{byte:02x}")).collect()))
    }

    /// The value of `MOE_WORLD_SECRET`, if it is set. `lookup` returns a variable's value.
    ///
    /// # Errors
    /// A secret of fewer than 16 characters.
    pub fn from_env(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, LaunchError> {
        let Some(secret) = Env(&lookup).get(WORLD_SECRET) else { return Ok(None) };
        match secret.chars().count() {
            MIN_LEN.. => Ok(Some(Self(secret))),
            // This error does not show the value, unlike the errors of other variables.
            len => refuse!(
                LaunchError::Secret,
                "the environment variable {WORLD_SECRET} has {len} characters; expected at least {MIN_LEN}, such as the output of \
                 `openssl rand -hex 32`"
            ),
        }
    }

    /// The secret as text, to set the variable for a process that this one starts.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

/// The key with which proofs are made.
#[derive(Clone)]
pub(super) struct Key {
    bytes: [u8; 32],
    /// Whether the key is unknown to strangers.
    pub secret: bool,
}

impl Key {
    /// The key of a world with this secret. Without a secret every process of this program knows the key, and proofs
    /// only show that a text arrived as it was sent.
    pub fn new(secret: Option<&WorldSecret>) -> Self {
        let text = secret.map_or("", |secret| secret.reveal());
        Self { bytes: mac(text.as_bytes(), &[b"moe-comm: world"]), secret: secret.is_some() }
    }

    /// The key between the ranks of a world that has formed. Only its ranks know the identity of the world.
    pub fn of_world(&self, world: &Nonce) -> Self {
        Self { bytes: mac(&self.bytes, &[b"moe-comm: links", world]), secret: self.secret }
    }
}

/// The sender of a text. A proof for one side is invalid for the other.
#[derive(Clone, Copy)]
pub(super) enum Side {
    /// The process that has connected.
    Guest,
    /// The process that listens.
    Host,
}

/// A text with its proof.
#[derive(Serialize, Deserialize, Debug)]
pub(super) struct Sealed {
    text: Vec<u8>,
    proof: [u8; 32],
}

/// One handshake: the key and the numbers that both sides have given.
#[derive(Clone)]
pub(super) struct Exchange {
    pub key: Key,
    pub guest: Nonce,
    pub host: Nonce,
}

impl Exchange {
    pub fn seal(&self, side: Side, message: &impl Serialize) -> io::Result<Sealed> {
        let text = postcard::to_stdvec(message).map_err(io::Error::other)?;
        let proof = mac(&self.key.bytes, &self.parts(side, &text));
        Ok(Sealed { text, proof })
    }

    /// The message in a text; `None` if the other side does not know the key or the text was altered.
    ///
    /// # Errors
    /// A text with a valid proof that is not a message of this type.
    pub fn open<T: DeserializeOwned>(&self, side: Side, sealed: &Sealed) -> io::Result<Option<T>> {
        let known = keyed(&self.key.bytes, &self.parts(side, &sealed.text));
        if known.verify_slice(&sealed.proof).is_err() {
            return Ok(None);
        }
        postcard::from_bytes(&sealed.text).map(Some).map_err(io::Error::other)
    }

    fn parts<'a>(&'a self, side: Side, text: &'a [u8]) -> [&'a [u8]; 4] {
        let side: &[u8] = match side {
            Side::Guest => b"guest",
            Side::Host => b"host ",
        };
        [side, &self.guest, &self.host, text]
    }
}

/// 256 random bits from the system.
pub(super) fn nonce() -> io::Result<Nonce> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).map_err(io::Error::other)?;
    Ok(nonce)
}

fn mac(key: &[u8], parts: &[&[u8]]) -> [u8; 32] {
    keyed(key, parts).finalize().into_bytes().into()
}

/// HMAC-SHA256 after all parts were added. Only the last part may have any length.
fn keyed(key: &[u8], parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut keyed = match Hmac::<Sha256>::new_from_slice(key) {
        Ok(keyed) => keyed,
        Err(_) => unreachable!("HMAC takes keys of any length"),
    };
    parts.iter().for_each(|part| keyed.update(part));
    keyed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(text: &str) -> WorldSecret {
        WorldSecret::from_env(|name| (name == WORLD_SECRET).then(|| text.to_string())).unwrap().unwrap()
    }

    fn exchange(secret: Option<&WorldSecret>) -> Exchange {
        Exchange { key: Key::new(secret), guest: [1; 32], host: [2; 32] }
    }

    /// The expected value is test case 2 of RFC 4231.
    #[test]
    fn the_proof_is_hmac_sha256() {
        let hex: String = mac(b"Jefe", &[b"what do ya ", b"want for nothing?"])
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect();
        assert_eq!(hex, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    }

    #[test]
    fn a_proof_holds_for_its_key_side_numbers_and_text_alone() {
        let own = exchange(Some(&secret("correct horse battery")));
        let sealed = own.seal(Side::Guest, &7u32).unwrap();
        let opens = |exchange: &Exchange, side, sealed: &Sealed| exchange.open::<u32>(side, sealed).unwrap();
        assert_eq!(opens(&own, Side::Guest, &sealed), Some(7));
        assert_eq!(opens(&own, Side::Host, &sealed), None);
        assert_eq!(opens(&Exchange { host: [3; 32], ..own.clone() }, Side::Guest, &sealed), None);
        assert_eq!(opens(&Exchange { guest: [3; 32], ..own.clone() }, Side::Guest, &sealed), None);
        assert_eq!(opens(&exchange(None), Side::Guest, &sealed), None);
        let other = Exchange { key: own.key.of_world(&[9; 32]), ..own.clone() };
        assert_eq!(opens(&other, Side::Guest, &sealed), None);
        for bit in 0..8 * sealed.text.len() {
            let mut altered = Sealed { text: sealed.text.clone(), proof: sealed.proof };
            altered.text[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(opens(&own, Side::Guest, &altered), None);
        }
    }

    #[test]
    fn secrets_are_random_long_and_never_shown() {
        let a = WorldSecret::random().unwrap();
        let b = WorldSecret::random().unwrap();
        assert!(a.reveal().len() == 64 && a.reveal() != b.reveal());
        assert_eq!(format!("{a:?}"), "WorldSecret(..)");
        assert!(WorldSecret::from_env(|_| None).unwrap().is_none());
        assert!(WorldSecret::from_env(|_| Some("  ".to_string())).unwrap().is_none());
        let error = WorldSecret::from_env(|_| Some("hunter2".to_string())).unwrap_err().to_string();
        assert!(error.contains("7 characters") && !error.contains("hunter2"), "{error}");
    }
}
