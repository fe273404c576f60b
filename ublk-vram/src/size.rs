//! Sizes as util-linux writes them: `K M G T P E` are powers of 1024 (`KiB` too), `KB MB ...` are powers
//! of 1000, a bare number is bytes. One parser for every place a size can be written.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// A size as the user wrote it: it becomes bytes once the free memory of the backend is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SizeSpec {
    /// Exactly so many bytes.
    Bytes(u64),
    /// So many percent (1 to 100) of what may be taken.
    Percent(u8),
    /// All that may be taken.
    Max,
}

impl SizeSpec {
    /// The size in bytes where `available` bytes may be taken, rounded down to 4 KiB for the forms
    /// that depend on it.
    ///
    /// # Errors
    /// [`crate::ErrorKind::Usage`] if an exact size is no multiple of 4096 bytes.
    pub fn resolve(self, available: u64) -> Result<u64> {
        match self {
            SizeSpec::Bytes(bytes) if bytes % 4096 != 0 => Err(Error::usage(format!(
                "size {bytes} is not a multiple of 4096 bytes, the device's block size: \
                 the nearest below is {}",
                bytes - bytes % 4096
            ))),
            SizeSpec::Bytes(bytes) => Ok(bytes),
            SizeSpec::Percent(percent) => Ok((available / 100 * u64::from(percent)
                + available % 100 * u64::from(percent) / 100)
                & !4095),
            SizeSpec::Max => Ok(available & !4095),
        }
    }
}

impl FromStr for SizeSpec {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text.eq_ignore_ascii_case("max") {
            return Ok(SizeSpec::Max);
        }
        if let Some(number) = text.strip_suffix('%') {
            return match number.parse::<u8>() {
                Ok(percent @ 1..=100) if number.bytes().all(|b| b.is_ascii_digit()) => {
                    Ok(SizeSpec::Percent(percent))
                }
                _ => Err(Error::usage(format!(
                    "size '{text}': a percentage must be a whole number from 1% to 100%"
                ))),
            };
        }
        parse_bytes(text).map(SizeSpec::Bytes)
    }
}

impl fmt::Display for SizeSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SizeSpec::Bytes(bytes) => write!(f, "{}", human(*bytes)),
            SizeSpec::Percent(percent) => write!(f, "{percent}%"),
            SizeSpec::Max => write!(f, "max"),
        }
    }
}

/// Bytes from a util-linux size (`512M`, `1.5GiB`, `2GB`, `4096`); zero is refused.
///
/// # Errors
/// [`crate::ErrorKind::Usage`] for anything that is not such a size, or is over 2^63 - 1.
pub fn parse_bytes(text: &str) -> Result<u64> {
    let wrong = |why: &str| {
        Error::usage(format!(
            "size '{text}' {why}: write bytes, or a number with K, M, G, T (1024) or KB, MB, GB, TB (1000)"
        ))
    };
    let digits = text.bytes().take_while(|b| b.is_ascii_digit()).count();
    let (whole, rest) = text.split_at(digits);
    if whole.is_empty() {
        return Err(wrong("does not begin with a number"));
    }
    let (fraction, suffix) = match rest.strip_prefix('.') {
        Some(tail) => {
            let digits = tail.bytes().take_while(|b| b.is_ascii_digit()).count();
            if digits == 0 {
                return Err(wrong("has a point with no digits after it"));
            }
            tail.split_at(digits)
        }
        None => ("", rest),
    };
    let unit = unit_bytes(suffix).ok_or_else(|| wrong("has an unknown unit"))?;
    if !fraction.is_empty() && unit == 1 {
        return Err(wrong("is a fraction of a byte"));
    }
    let too_large = || wrong("is too large");
    let mut total: u128 = whole
        .parse::<u128>()
        .ok()
        .and_then(|n| n.checked_mul(unit))
        .ok_or_else(too_large)?;
    // More than 18 digits after the point cannot change a size below 2^63.
    let fraction = fraction.get(..18).unwrap_or(fraction);
    if !fraction.is_empty() {
        let numerator: u128 = fraction.parse().map_err(|_| wrong("is not a number"))?;
        let scale = 10u128.pow(u32::try_from(fraction.len()).map_err(|_| too_large())?);
        total += numerator * unit / scale;
    }
    match u64::try_from(total) {
        Ok(0) => Err(wrong("is zero")),
        Ok(bytes) if i64::try_from(bytes).is_ok() => Ok(bytes),
        _ => Err(too_large()),
    }
}

fn unit_bytes(suffix: &str) -> Option<u128> {
    let suffix = suffix.to_ascii_uppercase();
    if suffix.is_empty() || suffix == "B" {
        return Some(1);
    }
    let mut letters = suffix.chars();
    let power = match letters.next()? {
        'K' => 1,
        'M' => 2,
        'G' => 3,
        'T' => 4,
        'P' => 5,
        'E' => 6,
        _ => return None,
    };
    match letters.as_str() {
        "" | "IB" => Some(1024u128.pow(power)),
        "B" => Some(1000u128.pow(power)),
        _ => None,
    }
}

/// Bytes as util-linux prints them: at most one decimal, 1024-based, no space (`1G`, `1.5M`, `512B`).
pub fn human(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "K", "M", "G", "T", "P", "E"];
    let mut unit_index = 0;
    let mut unit = 1u64;
    while unit_index + 1 < UNITS.len() && bytes / unit >= 1024 {
        unit *= 1024;
        unit_index += 1;
    }
    let name = UNITS.get(unit_index).copied().unwrap_or("B");
    let whole = bytes / unit;
    let tenths = (u128::from(bytes % unit) * 10 + u128::from(unit) / 2) / u128::from(unit);
    match tenths {
        0 => format!("{whole}{name}"),
        10 => format!("{}{name}", whole + 1),
        _ => format!("{whole}.{tenths}{name}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn util_linux_sizes() {
        for (text, bytes) in [
            ("4096", 4096),
            ("1K", 1024),
            ("1k", 1024),
            ("1KiB", 1024),
            ("1KB", 1000),
            ("1.5M", 1_572_864),
            ("2G", 2 << 30),
            ("2GB", 2_000_000_000),
            ("0.5K", 512),
            ("7E", 7 << 60),
        ] {
            assert_eq!(parse_bytes(text).unwrap(), bytes, "{text}");
        }
    }

    #[test]
    fn wrong_sizes_are_errors_never_a_default() {
        for text in [
            "",
            "0",
            "0G",
            "-1",
            "+1",
            "2Q",
            "1e400",
            "1e3",
            "G",
            "1.",
            "1.G",
            ".5G",
            "1 G",
            "9E",
            "16E",
            "99999999999999999999999999999999999999999",
            "1.5",
            "1GG",
            "1iB",
            "0x10",
            "1,5G",
            "١G",
        ] {
            assert!(parse_bytes(text).is_err(), "{text} must be refused");
        }
        for text in ["0%", "101%", "-1%", "1.5%", "%", "+5%", "maximum"] {
            assert!(text.parse::<SizeSpec>().is_err(), "{text} must be refused");
        }
    }

    #[test]
    fn percent_and_max_are_of_what_may_be_taken() {
        assert_eq!(
            "max".parse::<SizeSpec>().unwrap().resolve(10_000).unwrap(),
            8192
        );
        assert_eq!(
            "50%".parse::<SizeSpec>().unwrap().resolve(1 << 30).unwrap(),
            1 << 29
        );
        assert_eq!(
            "100%"
                .parse::<SizeSpec>()
                .unwrap()
                .resolve(u64::MAX)
                .unwrap(),
            !4095
        );
        assert!(
            "5000"
                .parse::<SizeSpec>()
                .unwrap()
                .resolve(1 << 30)
                .is_err()
        );
    }

    #[test]
    fn human_is_short() {
        for (bytes, text) in [
            (0, "0B"),
            (512, "512B"),
            (4096, "4K"),
            (1536, "1.5K"),
            (1 << 30, "1G"),
        ] {
            assert_eq!(human(bytes), text);
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_size_or_an_error(text in ".{0,40}") {
            let _ = text.parse::<SizeSpec>();
        }

        #[test]
        fn bytes_come_back(bytes in 1u64..(1 << 62)) {
            prop_assert_eq!(parse_bytes(&bytes.to_string()).unwrap(), bytes);
        }
    }
}
