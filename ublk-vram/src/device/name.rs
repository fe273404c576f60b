//! The name a user gives to a device.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// A device's name: 1 to 32 of `A-Z a-z 0-9 _ . -`, beginning with a letter or a digit.
///
/// It becomes part of a path (`/run/ublk-vram/NAME.sock`), a udev link and a unit name, so nothing
/// else is let in.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DeviceName(String);

impl DeviceName {
    /// The longest name, in bytes: it has to fit a chunk header and a unix socket path.
    pub const MAX_LEN: usize = 32;

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for DeviceName {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = |why: &str| Err(Error::usage(format!("device name '{text}' {why}")));
        match text.bytes().next() {
            None => return Err(Error::usage("a device name must not be empty")),
            Some(first) if !first.is_ascii_alphanumeric() => {
                return wrong("must begin with a letter or a digit");
            }
            Some(_) => {}
        }
        if text.len() > Self::MAX_LEN {
            return wrong("is longer than 32 characters");
        }
        if !text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b))
        {
            return wrong("may hold only letters, digits, '_', '.' and '-'");
        }
        Ok(DeviceName(text.to_owned()))
    }
}

impl TryFrom<String> for DeviceName {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<DeviceName> for String {
    fn from(name: DeviceName) -> String {
        name.0
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_are_safe_in_a_path() {
        for good in ["a", "swap0", "gpu-0.fast", "0", &"x".repeat(32)] {
            assert_eq!(good.parse::<DeviceName>().unwrap().as_str(), good);
        }
        for bad in [
            "",
            ".",
            "..",
            "-a",
            "_a",
            "a/b",
            "a b",
            "a\0",
            "ü",
            &"x".repeat(33),
            "../x",
        ] {
            assert!(
                bad.parse::<DeviceName>().is_err(),
                "{bad:?} must be refused"
            );
        }
    }
}
