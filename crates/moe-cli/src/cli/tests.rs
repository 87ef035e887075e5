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
    assert_eq!(generate("-").stdin.as_deref(), Some("-"));
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
