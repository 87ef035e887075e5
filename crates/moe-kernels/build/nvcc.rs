//! Compiling the CUDA kernels. Shared by this crate's build script and by `cargo xtask kernels`, so
//! that what is linked is what is reported.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::SystemTime;

/// Architectures with machine code of their own, ascending. 90a is Hopper with all its instructions.
const ARCHITECTURES: &[&str] = &["80", "90a"];

/// The first of [`ARCHITECTURES`] becomes PTX, too, in the files of the portable tier.
const PORTABLE_PTX: &str = "80";

/// The portable tier: folders and files of kernels that need no feature that came after [`PORTABLE_PTX`], and that are
/// enough to run a model. All other files are the tuned tier.
const PORTABLE: &[&str] =
    &["any/", "delta/", "load/", "rows/", "quant/dequantise.cu", "quant/order_rows.cu", "router/balance.cu"];

/// What each tier is compiled to, for the choice of kernels (`src/images.rs`): `portable sm_80 .. compute_80; tuned
/// ..`.
#[allow(dead_code)] // The report of the kernels has no use for it.
pub fn images() -> String {
    let machine: Vec<String> = ARCHITECTURES.iter().map(|arch| format!("sm_{arch}")).collect();
    let machine = machine.join(" ");
    format!("portable {machine} compute_{PORTABLE_PTX}; tuned {machine}")
}

/// Whether a source, relative to the folder of all sources, is in the portable tier.
fn is_portable(source: &Path) -> bool {
    PORTABLE.iter().any(|place| source.starts_with(place))
}

/// What a failed step says.
pub type Error = String;

/// A compiled source file.
pub struct Object {
    /// The object file.
    pub path: PathBuf,
    /// What the compiler said: registers, shared memory and spills of each kernel.
    #[allow(dead_code)] // The build script has no report.
    pub log: String,
}

/// Compiles every .cu below `sources` with `nvcc` into `out`, several at a time; objects that are up to date are kept.
/// Includes are relative to `sources`. After a failure no other file is begun.
pub fn compile_all(nvcc: &Path, sources: &Path, out: &Path) -> Result<Vec<Object>, Error> {
    fs::create_dir_all(out).map_err(|e| format!("cannot make {}: {e}", out.display()))?;
    let files = files_and_objects(sources, out)?;
    let compile_one = |(file, object): &(PathBuf, PathBuf)| {
        let mut command = vec![nvcc.to_string_lossy().into_owned()];
        command.extend(flags(is_portable(file.strip_prefix(sources).unwrap_or(file))));
        command.extend(["-I".to_string(), sources.to_string_lossy().into_owned()]);
        compile(&command, file, newest(sources, file)?, object)
    };
    let next = AtomicUsize::new(0);
    let compile_some = || {
        let mut compiled = Vec::new();
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some(file) = files.get(i) else { return Ok(compiled) };
            match compile_one(file) {
                Ok(object) => compiled.push((i, object)),
                Err(e) => {
                    next.store(files.len(), Ordering::Relaxed);
                    return Err(e);
                }
            }
        }
    };
    let parts = thread::scope(|scope| {
        let workers: Vec<_> = (0..jobs()).map(|_| scope.spawn(compile_some)).collect();
        let joined = workers.into_iter().map(|worker| worker.join());
        joined.map(|part| part.unwrap_or_else(|_| Err("a thread that compiles panicked".into()))).collect()
    });
    let parts: Result<Vec<Vec<(usize, Object)>>, Error> = parts;
    let mut objects: Vec<(usize, Object)> = parts?.into_iter().flatten().collect();
    objects.sort_by_key(|(i, _)| *i);
    Ok(objects.into_iter().map(|(_, object)| object).collect())
}

/// Compilers that run at a time. Each takes two threads, one per architecture, but most of the work of a kernel for
/// Hopper is in one of them: one compiler more than halves of the cores keeps all cores busy.
fn jobs() -> usize {
    thread::available_parallelism().map_or(1, |cores| cores.get() / 2 + 1)
}

/// Every .cu below `sources`, and its object in `out`: layer_stream.o of layer/stream.cu. An object's name
/// says its folder, so that no two are the same.
pub fn files_and_objects(sources: &Path, out: &Path) -> Result<Vec<(PathBuf, PathBuf)>, Error> {
    let files = files_with(sources, "cu")?;
    if files.is_empty() {
        return Err(format!("{} holds no .cu file", sources.display()));
    }
    let object = |file: &Path| {
        let inside = file.strip_prefix(sources).unwrap_or(file).with_extension("o");
        let parts: Vec<_> = inside.iter().map(|part| part.to_string_lossy()).collect();
        out.join(parts.join("_"))
    };
    Ok(files.into_iter().map(|file| (file.clone(), object(&file))).collect())
}

/// The files below `dir` with this extension, sorted.
pub fn files_with(dir: &Path, extension: &str) -> Result<Vec<PathBuf>, Error> {
    let entries = fs::read_dir(dir).map_err(|e| format!("cannot read {}: {e}", dir.display()))?;
    let mut paths = Vec::new();
    for path in entries.filter_map(|e| Some(e.ok()?.path())) {
        if path.is_dir() {
            paths.extend(files_with(&path, extension)?);
        } else if path.extension().is_some_and(|e| e == extension) {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// The time of the last change of a source, or of a file that it includes directly or indirectly. Files outside of
/// `sources` (CUDA's) do not change without another compiler.
fn newest(sources: &Path, file: &Path) -> Result<SystemTime, Error> {
    let mut files = vec![file.to_path_buf()];
    let mut newest = SystemTime::UNIX_EPOCH;
    let mut next = 0;
    while let Some(path) = files.get(next) {
        newest = newest.max(modified(path)?);
        let text = fs::read_to_string(path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
        for included in includes(&text).map(|name| sources.join(name)) {
            if included.exists() && !files.contains(&included) {
                files.push(included);
            }
        }
        next += 1;
    }
    Ok(newest)
}

/// What a source includes by a name in quotes.
fn includes(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| line.trim_start().strip_prefix("#include \"")?.split('"').next())
}

fn modified(path: &Path) -> Result<SystemTime, Error> {
    let time = fs::metadata(path).and_then(|m| m.modified());
    time.map_err(|e| format!("cannot read {}: {e}", path.display()))
}

/// `portable`: for a file of the portable tier.
fn flags(portable: bool) -> Vec<String> {
    let all = "-std=c++17 -O3 -lineinfo --threads 2 -Werror all-warnings \
               -Xcompiler -fPIC,-Wall,-Wextra,-Werror -Xptxas -v";
    let mut flags: Vec<String> = all.split_whitespace().map(str::to_string).collect();
    for arch in ARCHITECTURES {
        flags.push("-gencode".to_string());
        flags.push(match portable && *arch == PORTABLE_PTX {
            // Both come out of one run of the front end, which takes most of the time.
            true => format!("arch=compute_{arch},code=[sm_{arch},compute_{arch}]"),
            false => format!("arch=compute_{arch},code=sm_{arch}"),
        });
    }
    if portable {
        flags.push("-DMOE_PTX".to_string());
    }
    flags
}

/// nvcc adds the flags of these variables to its command line, where the log does not show them. An object would keep
/// them, for example the -O0 that a check sets for other crates' kernels, and would be linked into the next library. So
/// they are not passed on.
const FLAG_VARIABLES: [&str; 2] = ["NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"];

fn nvcc_command(compiler: &[String], source: &Path, object: &Path) -> Command {
    let mut command = Command::new(&compiler[0]);
    command.args(&compiler[1..]).arg("-c").arg(source).arg("-o").arg(object);
    for name in FLAG_VARIABLES {
        command.env_remove(name);
    }
    command
}

/// The log is written last and begins with the command, so an object with a log of the same command
/// that is newer than its sources, which changed last at `changed`, is up to date.
fn compile(compiler: &[String], source: &Path, changed: SystemTime, object: &Path) -> Result<Object, Error> {
    let (object, log) = (object.to_path_buf(), object.with_extension("log"));
    let mut command = nvcc_command(compiler, source, &object);
    let head = format!("{command:?}\n");
    if let (Ok(text), Ok(time)) = (fs::read_to_string(&log), modified(&log))
        && object.exists()
        && text.starts_with(&head)
        && time > changed
    {
        return Ok(Object { path: object, log: text });
    }
    eprintln!("compiling {}", source.display());
    let output = command.output().map_err(|e| format!("cannot start {}: {e}", compiler[0]))?;
    let messages =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if !output.status.success() {
        return Err(format!("{command:?} failed:\n{messages}"));
    }
    let text = head + &messages;
    fs::write(&log, &text).map_err(|e| format!("cannot write {}: {e}", log.display()))?;
    Ok(Object { path: object, log: text })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_changes_what_includes_it_and_nothing_else() {
        let dir = std::env::temp_dir().join(format!("moe-nvcc-{}", std::process::id()));
        fs::create_dir_all(dir.join("ptx")).unwrap();
        let write = |name: &str, text: &str, seconds: u64| {
            fs::write(dir.join(name), text).unwrap();
            let time = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
            fs::File::open(dir.join(name)).unwrap().set_modified(time).unwrap();
            time
        };
        let plain = write("plain.cu", "#include <cuda.h>\n#include \"cuda.h\"\n", 10);
        write("both.cu", "  #include \"ptx/a.cuh\"\n", 20);
        write("ptx/a.cuh", "#pragma once\n#include \"ptx/b.cuh\"\n#include \"ptx/a.cuh\"\n", 30);
        let deepest = write("ptx/b.cuh", "// nothing\n", 40);
        assert_eq!(newest(&dir, &dir.join("plain.cu")).unwrap(), plain);
        assert_eq!(newest(&dir, &dir.join("both.cu")).unwrap(), deepest);
        assert!(newest(&dir, &dir.join("none.cu")).unwrap_err().contains("none.cu"));
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    #[cfg(unix)]
    fn objects_are_in_the_order_of_their_files_and_a_failure_is_named() {
        use std::os::unix::fs::PermissionsExt;
        let dir = std::env::temp_dir().join(format!("moe-nvcc-all-{}", std::process::id()));
        let sources = dir.join("sources/any");
        fs::create_dir_all(&sources).unwrap();
        // A compiler that makes an empty object, the last argument, unless the source is called bad.cu.
        let compiler = dir.join("compiler");
        fs::write(
            &compiler,
            "#!/bin/sh\ncase \"$*\" in *bad.cu*) exit 1;; esac\nfor object; do :; done\n: > \"$object\"\n",
        )
        .unwrap();
        fs::set_permissions(&compiler, fs::Permissions::from_mode(0o755)).unwrap();
        for name in 0..9 {
            fs::write(sources.join(format!("{name}.cu")), "").unwrap();
        }
        let compiled = || compile_all(&compiler, &dir.join("sources"), &dir.join("out"));
        let names: Vec<String> = compiled()
            .unwrap()
            .iter()
            .map(|object| object.path.file_name().unwrap().to_string_lossy().into_owned())
            .collect();
        assert_eq!(names, (0..9).map(|name| format!("any_{name}.o")).collect::<Vec<_>>());
        fs::write(sources.join("bad.cu"), "").unwrap();
        assert!(compiled().err().unwrap().contains("bad.cu"));
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn the_portable_tier_is_built_as_ptx_too() {
        for (source, portable) in [
            ("any/linear.cu", true),
            ("router/balance.cu", true),
            ("router/gate_route.cu", false),
            ("quant/dequantise.cu", true),
            ("delta/rule.cu", true),
            ("quant/linear_stream.cu", false),
            ("anything.cu", false),
        ] {
            assert_eq!(is_portable(Path::new(source)), portable, "{source}");
            let has_ptx = flags(portable).iter().any(|flag| flag.contains("code=[sm_80,compute_80]"));
            assert_eq!(has_ptx, portable, "{source}");
        }
        assert_eq!(images(), "portable sm_80 sm_90a compute_80; tuned sm_80 sm_90a");
    }

    #[test]
    fn flags_of_the_environment_do_not_reach_objects() {
        let command = nvcc_command(&["nvcc".to_string()], Path::new("a.cu"), Path::new("a.o"));
        for name in FLAG_VARIABLES {
            assert!(command.get_envs().any(|(key, value)| key == name && value.is_none()), "{name}");
        }
    }
}
