//! Downloads packages of a Debian suite by name, through apt, without touching the machine's own
//! lists.
//!
//! apt does what is hard: mirrors, proxies, signatures, partial files. The mirror is the one this
//! machine is configured for, asked of apt at run time; `VMRIG_MIRROR` names another.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

/// Signs every Debian suite; part of the package debian-archive-keyring.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// A private apt state for one suite.
pub(crate) struct Apt {
    options: Vec<String>,
}

impl Apt {
    /// Makes the state in `dir` and fetches the suite's lists.
    pub(crate) fn update(dir: &Path, suite: &str) -> Result<Self> {
        for sub in ["lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(dir.join(sub))
                .with_context(|| format!("cannot make {}", dir.join(sub).display()))?;
        }
        if !Path::new(KEYRING).exists() {
            bail!("{KEYRING} is missing: install the package debian-archive-keyring");
        }
        let sources = dir.join("sources.list");
        let mirror = mirror()?;
        fs::write(
            &sources,
            format!("deb [signed-by={KEYRING}] {mirror} {suite} main\n"),
        )
        .with_context(|| format!("cannot write {}", sources.display()))?;
        let option = |name: &str, value: &dyn std::fmt::Display| format!("-o{name}={value}");
        let apt = Self {
            options: vec![
                option("Dir::State::Lists", &dir.join("lists").display()),
                option("Dir::Etc::SourceList", &sources.display()),
                option("Dir::Etc::SourceParts", &"/nonexistent"),
                option("Dir::Cache", &dir.join("cache").display()),
                option("Acquire::Languages", &"none"),
                option("Acquire::Retries", &"2"),
                option("APT::Sandbox::User", &"root"),
                option("APT::Architecture", &"amd64"),
            ],
        };
        apt.run("apt-get", &["update", "-qq", "--error-on=any"], dir)
            .with_context(|| format!("cannot fetch the package lists of Debian {suite}"))?;
        Ok(apt)
    }

    /// `apt-cache depends` of one package.
    pub(crate) fn depends(&self, package: &str) -> Result<String> {
        self.run("apt-cache", &["depends", package], Path::new("/"))
    }

    /// Whether the suite has a package of that name.
    pub(crate) fn knows(&self, package: &str) -> bool {
        self.run("apt-cache", &["show", package], Path::new("/"))
            .is_ok_and(|text| !text.is_empty())
    }

    /// Downloads packages and unpacks them below `root`; nothing is installed.
    pub(crate) fn unpack(&self, packages: &[String], root: &Path) -> Result<()> {
        let downloads = root.join("debs");
        fs::create_dir_all(&downloads)?;
        let mut arguments = vec!["download", "-qq"];
        arguments.extend(packages.iter().map(String::as_str));
        self.run("apt-get", &arguments, &downloads)
            .with_context(|| format!("cannot download {}", packages.join(", ")))?;
        let mut debs: Vec<PathBuf> = fs::read_dir(&downloads)?
            .map(|entry| Ok(entry?.path()))
            .collect::<Result<_>>()?;
        debs.retain(|path| path.extension().is_some_and(|extension| extension == "deb"));
        if debs.len() < packages.len() {
            bail!(
                "apt downloaded {} of {} packages",
                debs.len(),
                packages.len()
            );
        }
        for deb in &debs {
            let status = Command::new("dpkg").arg("-x").arg(deb).arg(root).status();
            if !status.context("cannot run dpkg")?.success() {
                bail!("cannot unpack {}", deb.display());
            }
        }
        fs::remove_dir_all(&downloads)?;
        Ok(())
    }

    fn run(&self, program: &str, arguments: &[&str], dir: &Path) -> Result<String> {
        let output = Command::new(program)
            .args(&self.options)
            .args(arguments)
            .current_dir(dir)
            .env("LC_ALL", "C")
            .output()
            .with_context(|| format!("cannot run {program}: kernels are fetched with apt"))?;
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            bail!("{program} {}: {}", arguments.join(" "), stderr.trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

/// The Debian mirror this machine uses.
///
/// # Errors
/// When apt is missing, or knows none.
pub fn mirror() -> Result<String> {
    if let Some(mirror) = env::var("VMRIG_MIRROR")
        .ok()
        .filter(|mirror| !mirror.is_empty())
    {
        return Ok(mirror);
    }
    let output = Command::new("apt-get")
        .args([
            "indextargets",
            "--format",
            "$(REPO_URI)\t$(RELEASE)\t$(COMPONENT)\t$(ORIGIN)",
        ])
        .arg("Created-By: Packages")
        .output()
        .context("cannot run apt-get: kernels are fetched with apt, or named with --kernel")?;
    let os_release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let codename = os_release
        .lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="));
    choose_mirror(
        &String::from_utf8_lossy(&output.stdout),
        codename.unwrap_or("stable"),
    )
    .context("apt on this machine knows no Debian mirror: name one with VMRIG_MIRROR=URI")
}

/// Picks the main archive (not security) of Debian from the targets apt lists.
fn choose_mirror(targets: &str, codename: &str) -> Option<String> {
    let rows = targets.lines().filter_map(|line| {
        let mut fields = line.split('\t');
        Some((
            fields.next()?,
            fields.next()?,
            fields.next()?,
            fields.next().unwrap_or(""),
        ))
    });
    let main = rows.filter(|(_, release, component, _)| {
        *component == "main" && !release.ends_with("-security") && !release.ends_with("/updates")
    });
    // The origin is known only once the machine's own lists were fetched.
    main.filter(|(_, release, _, origin)| {
        *origin == "Debian" || (origin.is_empty() && *release == codename)
    })
    .map(|(uri, ..)| uri.to_owned())
    .next()
}

/// The versioned package that a `linux-image-FLAVOUR` meta package stands for, without its
/// `linux-image-`.
pub(crate) fn release_of(depends: &str) -> Option<String> {
    depends
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix("Depends: linux-image-"))
        .find(|release| release.starts_with(|first: char| first.is_ascii_digit()))
        .map(|release| release.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn release_is_read_from_depends() {
        let split = "linux-image-cloud-amd64\n  Depends: linux-base-cloud-amd64\n  \
                     Depends: linux-image-7.3.4+deb13-cloud-amd64\n  Depends: linux-modules-x\n";
        assert_eq!(
            release_of(split).as_deref(),
            Some("7.3.4+deb13-cloud-amd64")
        );
        assert_eq!(
            release_of("linux-image-x\n  Depends: linux-image-amd64\n"),
            None
        );
    }

    #[test]
    fn mirror_is_the_main_archive() {
        let targets = "http://m/debian-security/\tbookworm-security\tmain\tDebian\n\
                       http://o/\tnodistro\tmain\t\n\
                       http://m/debian/\tbookworm\tmain\tDebian\n";
        assert_eq!(
            choose_mirror(targets, "bookworm").as_deref(),
            Some("http://m/debian/")
        );
        let unfetched = "http://o/\tnodistro\tmain\t\nhttp://m/debian/\tbookworm\tmain\t\n";
        assert_eq!(
            choose_mirror(unfetched, "bookworm").as_deref(),
            Some("http://m/debian/")
        );
        let ubuntu = "http://u/ubuntu/\tnoble\tmain\tUbuntu\n";
        assert_eq!(choose_mirror(ubuntu, "noble"), None);
    }
}
