//! Kernels whose ublk is known to have hung or crashed machines.
//!
//! Nobody can tell from a version which fixes a distribution took, so this only warns: `vramctl
//! check` prints it, the server says it when ADD_DEV does not answer.

/// One line of the table: releases it fits, and what happened there.
struct Record {
    fits: fn(&Release<'_>) -> bool,
    trouble: &'static str,
}

/// `6.17.0-5-generic` as numbers and the rest.
#[derive(Debug, PartialEq, Eq)]
struct Release<'a> {
    version: u32,
    patch: u32,
    sub: u32,
    flavour: &'a str,
}

const RECORDS: [Record; 5] = [
    Record {
        fits: |r| (r.version, r.patch) == (6, 8),
        trouble: "the kernel can crash when a ublk server ends under load (CVE-2025-37906)",
    },
    Record {
        fits: |r| (r.version, r.patch) == (6, 17) && !r.flavour.is_empty(),
        trouble: "distribution builds of 6.17 crashed when a ublk device was added \
                  (ublk_init_queues), and left processes that nothing ends after a server was killed",
    },
    Record {
        fits: |r| (r.version, r.patch, r.sub) == (6, 18, 4) && r.flavour.contains("zabbly"),
        trouble: "this build starts the ublk driver in the wrong order, so that adding a device fails",
    },
    Record {
        fits: |r| (r.version, r.patch, r.sub) == (6, 18, 40),
        trouble: "ublk control commands stopped answering after many devices were added and removed",
    },
    Record {
        fits: |r| (r.version, r.patch) == (7, 0),
        trouble: "ublk control commands stopped answering after many devices were added and removed",
    },
];

/// What is on record against the ublk driver of this kernel release (`uname -r`), as one sentence.
pub fn kernel_warning(release: &str) -> Option<String> {
    let parsed = parse(release)?;
    let record = RECORDS.iter().find(|record| (record.fits)(&parsed))?;
    Some(format!(
        "kernel {release}: {}; use another kernel if it happens here too",
        record.trouble
    ))
}

fn parse(release: &str) -> Option<Release<'_>> {
    let end = release
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(release.len());
    let (numbers, flavour) = release.split_at_checked(end)?;
    let mut numbers = numbers.split('.');
    Some(Release {
        version: numbers.next()?.parse().ok()?,
        patch: numbers.next()?.parse().ok()?,
        // 7.0-rc4 and 7.0+ have no third number.
        sub: numbers.next().and_then(|n| n.parse().ok()).unwrap_or(0),
        flavour,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn kernels_with_trouble_on_record() {
        for (release, part) in [
            ("6.8.0-31-generic", "CVE-2025-37906"),
            ("6.17.0-5-generic", "ublk_init_queues"),
            ("6.18.4-zabbly+", "wrong order"),
            ("6.18.40", "stopped answering"),
            ("6.18.40-1-lts", "stopped answering"),
            ("7.0.3-arch1-1", "stopped answering"),
            ("7.0-rc4", "stopped answering"),
        ] {
            let warning = kernel_warning(release).unwrap();
            assert!(
                warning.starts_with(&format!("kernel {release}: ")),
                "{warning}"
            );
            assert!(warning.contains(part), "{warning}");
        }
    }

    #[test]
    fn kernels_without() {
        for release in [
            "6.12.117+deb13-cloud-amd64",
            "7.3.4+deb13-amd64",
            "6.17.3",
            "6.18.4",
            "6.18.44-fc-v669",
            "6.1.192",
            "6.80.0",
            "17.0.1",
            "",
            "linux",
            "7",
        ] {
            assert_eq!(kernel_warning(release), None, "{release}");
        }
    }

    #[test]
    fn the_parts_of_a_release() {
        let release = parse("6.12.117+deb13-cloud-amd64").unwrap();
        assert_eq!((release.version, release.patch, release.sub), (6, 12, 117));
        assert_eq!(release.flavour, "+deb13-cloud-amd64");
    }

    proptest! {
        #[test]
        fn any_release_is_fine(release in ".{0,30}") {
            let _ = kernel_warning(&release);
        }
    }
}
