//! The address of a PCI function, as sysfs and `lspci` write it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// `DOMAIN:BUS:DEVICE.FUNCTION`, all hexadecimal: `0000:03:00.0`. The order is the order of the bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

impl PciAddress {
    /// Whether the function sits on the first bus of the first domain, where the devices are that are
    /// built into the processor package.
    pub(super) fn is_on_root_bus(&self) -> bool {
        self.domain == 0 && self.bus == 0
    }

    /// The domain's number.
    pub(super) fn domain(&self) -> u32 {
        self.domain
    }

    /// The bus's number.
    pub(super) fn bus(&self) -> u8 {
        self.bus
    }

    /// Device and function in one byte, as PCI has them on the wire.
    pub(super) fn devfn(&self) -> u8 {
        self.device << 3 | self.function
    }
}

impl FromStr for PciAddress {
    type Err = Error;

    /// Takes `0000:03:00.0` and, in domain 0, `03:00.0`.
    fn from_str(text: &str) -> Result<Self> {
        parse(text).ok_or_else(|| {
            Error::usage(format!(
                "'{text}' is not a PCI address: write it as `lspci -D` does, such as 0000:03:00.0"
            ))
        })
    }
}

fn parse(text: &str) -> Option<PciAddress> {
    let (rest, function) = text.rsplit_once('.')?;
    let (rest, device) = rest.rsplit_once(':')?;
    // The kernel pads domains to four digits; virtual ones (Intel VMD) have five or more.
    let (domain, bus) = match rest.rsplit_once(':') {
        Some((domain, bus)) => (hex(domain, 4, 8)?, bus),
        None => (0, rest),
    };
    let address = PciAddress {
        domain,
        bus: u8::try_from(hex(bus, 2, 2)?).ok()?,
        device: u8::try_from(hex(device, 2, 2)?).ok()?,
        function: u8::try_from(hex(function, 1, 1)?).ok()?,
    };
    (address.device < 32 && address.function < 8).then_some(address)
}

/// A hexadecimal number of `min` to `max` digits, and nothing else around it.
fn hex(text: &str, min: usize, max: usize) -> Option<u32> {
    let digits = text.bytes().all(|byte| byte.is_ascii_hexdigit());
    if !digits || !(min..=max).contains(&text.len()) {
        return None;
    }
    u32::from_str_radix(text, 16).ok()
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PciAddress {
            domain,
            bus,
            device,
            function,
        } = self;
        f.pad(&format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}"))
    }
}

impl TryFrom<String> for PciAddress {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<PciAddress> for String {
    fn from(address: PciAddress) -> String {
        address.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn both_forms_and_the_canonical_text() {
        for (text, canonical) in [
            ("0000:03:00.0", "0000:03:00.0"),
            ("03:00.0", "0000:03:00.0"),
            ("C1:1F.7", "0000:c1:1f.7"),
            ("10000:e1:00.1", "10000:e1:00.1"),
        ] {
            assert_eq!(
                text.parse::<PciAddress>().unwrap().to_string(),
                canonical,
                "{text}"
            );
        }
        assert_eq!(
            format!("{:>14}", "03:00.0".parse::<PciAddress>().unwrap()),
            "  0000:03:00.0"
        );
    }

    #[test]
    fn anything_else_is_refused() {
        for text in [
            "",
            ".",
            ":",
            "3:00.0",
            "03:0.0",
            "03:00",
            "03:00.8",
            "03:20.0",
            "03:00.00",
            "000:03:00.0",
            "000000000:03:00.0",
            "0000:03:00.0 ",
            " 03:00.0",
            "+3:00.0",
            "0x03:00.0",
            "0000:0000:03:00.0",
            "0000:03:00.0/../x",
            "٠٣:00.0",
        ] {
            let error = text.parse::<PciAddress>().unwrap_err();
            assert_eq!(error.kind, crate::ErrorKind::Usage, "{text}");
        }
    }

    #[test]
    fn the_order_is_that_of_the_bus() {
        let sorted = [
            "0000:00:1f.0",
            "0000:03:00.0",
            "0000:03:00.1",
            "0000:10:00.0",
            "10000:00:00.0",
        ];
        let mut addresses: Vec<PciAddress> =
            sorted.iter().rev().map(|a| a.parse().unwrap()).collect();
        addresses.sort();
        assert_eq!(
            addresses
                .iter()
                .map(PciAddress::to_string)
                .collect::<Vec<_>>(),
            sorted
        );
    }

    proptest! {
        #[test]
        fn what_is_printed_is_read_back(domain: u32, bus: u8, device in 0u8..32, function in 0u8..8) {
            let address = PciAddress { domain, bus, device, function };
            prop_assert_eq!(address.to_string().parse::<PciAddress>().unwrap(), address);
        }

        #[test]
        fn no_text_makes_it_panic(text in "[0-9a-f:.x]{0,16}") {
            let _ = text.parse::<PciAddress>();
        }
    }
}
