//! Command lines as people write them.

use super::*;
use candle_core::DType;

#[test]
fn the_definition_is_consistent() {
    Cli::command().debug_assert();
}

fn generate(line: &str) -> GenerateArgs {
    match Cli::command_of(std::iter::once("m").chain(line.split(' '))) {
        Ok(Command::Generate(args)) => *args,
        other => panic!("{line}: {other:?}"),
    }
}

fn error(line: &str) -> String {
    Cli::command_of(std::iter::once("m").chain(line.split(' '))).unwrap_err().to_string()
}

#[test]
fn generate_is_the_default() {
    let args = generate("--prompt x --top-k -1");
    assert_eq!((args.prompt, args.sampling.top_k), (vec!["x".to_string()], Some(-1)));
    assert_eq!(generate("-").text.as_deref(), Some("-"));
    assert!(generate("--batch-invariant generate").run.batch_invariant);
    assert!(error("--prompt x --prompt-file y").contains("cannot be used with"));
}

#[test]
fn a_word_that_is_no_command_is_named_with_the_nearest() {
    let e = error("gnerate");
    assert!(e.contains("unrecognized subcommand 'gnerate'") && e.contains("'generate'"), "{e}");
    assert!(error("list").contains("unrecognized subcommand 'list'"));
    assert!(error("--model X chta").contains("'chat'"));
}

#[test]
fn whole_numbers_say_what_they_expect() {
    for (line, expected) in [
        ("-p x --max-num-seqs 1GiB", "without sign or unit"),
        ("-p x --tp -1", "'-1' for '--tp <N>'"),
        ("-p x --enable-chunked-moe --chunked-moe-size 0", "at least 1"),
        ("-p x --max-new-tokens 99999999999999999999", "too large"),
    ] {
        let e = error(line);
        assert!(e.starts_with("error: invalid value") && e.contains(expected), "{line}: {e}");
        assert!(!e.contains("digit") && !e.contains("non-zero"), "{line}: {e}");
    }
}

#[test]
fn names_of_vllm_and_llama_cpp_are_understood() {
    let vllm = generate("--max-tokens 5 --tensor-parallel-size 2 --data-parallel-size 3 --dtype bfloat16");
    assert_eq!(vllm.sampling.max_new_tokens, Some(5));
    assert_eq!((vllm.run.parallel.tp, vllm.run.parallel.dp), (2, 3));
    assert_eq!(vllm.run.dtype.dtype(), Some(DType::BF16));
    assert_eq!(generate("--dtype float16").run.dtype.dtype(), Some(DType::F16));
    assert_eq!(generate("--dtype auto").run.dtype.dtype(), None);
    let llama = generate("-p x -t 2 --temp 0.5 --n-predict 7");
    assert_eq!((llama.prompt, llama.run.num_threads), (vec!["x".to_string()], Some(2)));
    assert_eq!((llama.sampling.temperature, llama.sampling.max_new_tokens), (Some(0.5), Some(7)));
}

#[test]
fn n_alone_is_refused_because_it_means_two_things() {
    let e = error("-p x -n 2");
    assert!(e.contains("--num-sequences") && e.contains("--max-new-tokens"), "{e}");
    assert_eq!(generate("--num-sequences 2").n, 2);
}

#[test]
fn flags_of_llama_cpp_and_vllm_mean_what_they_mean_there() {
    let args = generate("-m o/m --revision v2 -c 256 --no-enable-prefix-caching -p x -q");
    assert_eq!(args.model.as_deref(), Some("o/m@v2"));
    assert_eq!((args.engine.max_model_len, args.engine.enable_prefix_caching), (Some(256), false));
    assert!(args.run.quiet && args.run.revision.is_none());
    assert_eq!(generate("-hf o/m -p x").model.as_deref(), Some("o/m"));
    assert_eq!(generate("--hf-repo o/m -p x").model.as_deref(), Some("o/m"));
    assert_eq!(generate("--gpu-memory-utilization 0.9 -p x").engine.gpu_memory_utilization, Some(0.9));
    assert_eq!(generate("--grammar-file g -p x").sampling.structured.guided_grammar.as_deref(), Some("g"));
    assert!(generate("--no-enable-prefix-caching --enable-prefix-caching -p x").engine.enable_prefix_caching);
    for line in ["-i a -o b", "--input-file a --output-file b"] {
        match Cli::command_of(std::iter::once("m").chain(["batch"]).chain(line.split(' '))) {
            Ok(Command::Batch(args)) => {
                assert_eq!((args.input.to_str(), args.output.to_str()), (Some("a"), Some("b")));
            }
            other => panic!("{line}: {other:?}"),
        }
    }
    for (line, words) in [
        ("--revision v2 -p x", "--revision is of a model on the hub"),
        ("-m o/m@v1 --revision v2 -p x", "names a revision, too"),
        ("-m . --revision v2 -p x", "is on this disk"),
        ("--gpu-memory-utilization 90 -p x", "at most 1"),
    ] {
        let e = error(line);
        assert!(e.contains(words), "{line}: {e}");
    }
}

#[test]
fn a_prompt_needs_no_flag() {
    let of = |args: &[&str]| match Cli::command_of([&["m"], args].concat()) {
        Ok(Command::Generate(args)) => *args,
        other => panic!("{other:?}"),
    };
    assert_eq!(of(&["The sea is"]).text.as_deref(), Some("The sea is"));
    assert_eq!(of(&["generate", "sea", "--seed", "1"]).text.as_deref(), Some("sea"));
    assert_eq!(of(&["-p", "- apples", "--stop", "--"]).prompt, ["- apples"]);
    assert_eq!(of(&["-p", "- apples", "--stop", "--"]).sampling.stop, ["--"]);
    assert!(error("generate sea -p x").contains("cannot be used with"));
}

#[test]
fn json_means_the_same_everywhere() {
    let json = |args: &[&str]| match Cli::command_of([&["m"], args].concat()).unwrap() {
        Command::Generate(args) => args.json,
        Command::Inspect(args) => args.json,
        Command::Bench(args) => args.json,
        Command::Parity(args) => args.json,
        other => panic!("{other:?}"),
    };
    let calls: [&[&str]; 4] =
        [&["-p", "x"], &["inspect", "o/m"], &["bench"], &["parity", "--model", "m", "--reference", "r"]];
    for call in calls {
        assert_eq!(json(call), None);
        assert_eq!(json(&[call, &["--json"]].concat()), Some(None));
        assert_eq!(json(&[call, &["--json=f"]].concat()), Some(Some("f".into())));
    }
    assert_eq!(
        json(&["bench", "--json", "f", "--repeat", "1"]),
        Some(Some("f".into())),
        "as it was written before"
    );
}
