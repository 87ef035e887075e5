//! The libraries as they would be published: packed by `cargo package`, then unpacked.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::workspace::{self, Package, cargo, target_dir};

/// Where a library's package is unpacked.
fn folder_of(library: &Package) -> Result<PathBuf> {
    let version = library.field("version").context("a package has no version")?;
    Ok(target_dir().join("packaged").join(format!("{}-{version}", library.name)))
}

/// Packs all libraries and unpacks their packages. Files that are not committed are packed as well.
pub fn unpack(libraries: &[&Package]) -> Result<()> {
    let archives = target_dir().join("package");
    let unpacked = target_dir().join("packaged");
    for folder in [&archives, &unpacked] {
        if folder.exists() {
            fs::remove_dir_all(folder).with_context(|| format!("cannot remove {}", folder.display()))?;
        }
    }
    fs::create_dir_all(&unpacked)?;
    // The projects that use the packages compile them, so cargo need not do it here.
    let mut package = cargo();
    package.args(["package", "--quiet", "--no-verify", "--allow-dirty"]);
    for library in libraries {
        package.args(["--package", &library.name]);
    }
    workspace::run(&mut package)?;
    for library in libraries {
        let folder = folder_of(library)?;
        let name = folder.file_name().context("a package has no name")?.to_string_lossy().into_owned();
        // Files of a package have one fixed date, by which cargo could not see that they are new.
        let mut tar = Command::new("tar");
        tar.args(["-x", "-z", "-m", "-f"]).arg(archives.join(name + ".crate")).arg("-C").arg(&unpacked);
        workspace::run(&mut tar)?;
    }
    Ok(())
}

/// The part of a project's manifest that takes our libraries from the unpacked packages instead of the registry.
pub fn patches(libraries: &[&Package], used_by: &Package) -> Result<String> {
    let used = workspace::dependencies(&used_by.name)?;
    let mut text = String::from("[patch.crates-io]\n");
    for library in libraries.iter().filter(|library| used.contains(&library.name)) {
        text += &format!("{} = {{ path = {:?} }}\n", library.name, path(library)?);
    }
    Ok(text)
}

/// The folder of an unpacked package, which must be there.
pub fn path(library: &Package) -> Result<PathBuf> {
    let folder = folder_of(library)?;
    if !Path::new(&folder).join("Cargo.toml").exists() {
        anyhow::bail!("{} is not unpacked at {}", library.name, folder.display())
    }
    Ok(folder)
}
