//! What a Dockerfile means, and that no text makes the parser panic.

use super::*;
use proptest::prelude::*;

fn steps(text: &str) -> Vec<Instruction> {
    let file = Dockerfile::parse(&format!("FROM base\n{text}"), &BTreeMap::new()).unwrap();
    let steps = file.steps(0, &[("PATH".to_owned(), "/bin".to_owned())]).unwrap();
    steps.into_iter().map(|step| step.instruction).collect()
}

fn error(text: &str) -> String {
    Dockerfile::parse(text, &BTreeMap::new()).unwrap_err().to_string()
}

fn pairs(list: &[(&str, &str)]) -> Vec<(String, String)> {
    list.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}

fn shell(text: &str) -> Instruction {
    run(Command::Shell(text.to_owned()))
}

fn run(command: Command) -> Instruction {
    Instruction::Run(Run { command, args: BTreeMap::new(), mounts: Vec::new() })
}

fn exec(words: &[&str]) -> Command {
    Command::Exec(words.iter().map(|word| (*word).to_owned()).collect())
}

#[test]
fn a_usual_file_is_understood() {
    let text = "# syntax=docker/dockerfile:1\n\
        # A comment\n\
        ARG VERSION=3\n\
        FROM python:${VERSION} AS app\n\
        \n\
        workdir /app\n\
        COPY --chown=1000:1000 --chmod=755 a.py b.py ./\n\
        RUN pip install \\\n\
        # in between\n\
        \x20   flask && \\\n\
        \x20   echo $HOME\n\
        ENV A=1 B=\"two words\" C=three\\ words\n\
        EXPOSE 80/tcp 443\n\
        USER app\n\
        HEALTHCHECK NONE\n\
        ENTRYPOINT [\"python\", \"a.py\"]\n\
        CMD serve --port 80\n";
    let file = Dockerfile::parse(text, &BTreeMap::new()).unwrap();
    assert_eq!(file.stages()[0].base, Base::Image("python:3".to_owned()));
    let steps = file.steps(0, &[]).unwrap();
    let copy = Copy {
        sources: vec!["a.py".to_owned(), "b.py".to_owned()],
        destination: "./".to_owned(),
        chown: Some("1000:1000".to_owned()),
        chmod: Some("755".to_owned()),
        ..Copy::default()
    };
    let expected = [
        Instruction::Workdir("/app".to_owned()),
        Instruction::Copy(copy),
        shell("pip install     flask &&     echo $HOME"),
        Instruction::Env(pairs(&[("A", "1"), ("B", "two words"), ("C", "three words")])),
        Instruction::Expose(vec!["80/tcp".to_owned(), "443/tcp".to_owned()]),
        Instruction::User("app".to_owned()),
        Instruction::Ignored,
        Instruction::Entrypoint(exec(&["python", "a.py"])),
        Instruction::Cmd(Command::Shell("serve --port 80".to_owned())),
    ];
    let found: Vec<_> = steps.iter().map(|step| step.instruction.clone()).collect();
    assert_eq!(found, expected);
    let lines: Vec<_> = steps.iter().map(|step| step.line).collect();
    assert_eq!(lines, [6, 7, 8, 12, 13, 14, 15, 16, 17]);
}

#[test]
fn variables_of_the_base_image_and_of_the_file_are_replaced() {
    let found = steps(
        "ENV PATH=/app:$PATH NAME=web\n\
         ENV GREETING=\"${NAME}-${MISSING:-none}-${NAME:+set}-${MISSING:+set}\" RAW='$NAME' E=\\$NAME\n\
         WORKDIR /srv/${NAME}\n\
         LABEL name=$NAME",
    );
    assert_eq!(found[0], Instruction::Env(pairs(&[("PATH", "/app:/bin"), ("NAME", "web")])));
    let env = pairs(&[("GREETING", "web-none-set-"), ("RAW", "$NAME"), ("E", "$NAME")]);
    assert_eq!(found[1], Instruction::Env(env));
    assert_eq!(found[2], Instruction::Workdir("/srv/web".to_owned()));
    assert_eq!(found[3], Instruction::Label(pairs(&[("name", "web")])));
}

#[test]
fn the_old_form_of_env_takes_the_rest_of_the_line() {
    let found = steps("ENV TITLE A long = title");
    assert_eq!(found, [Instruction::Env(pairs(&[("TITLE", "A long = title")]))]);
}

#[test]
fn build_arguments_are_seen_by_commands_until_a_variable_hides_them() {
    let given = BTreeMap::from([("A".to_owned(), "given".to_owned())]);
    let text = "ARG G=global\nFROM base\nARG A=default\nARG B=b-$A\nARG C\nARG G\nRUN one\n\
        ENV A=env\nRUN two";
    let file = Dockerfile::parse(text, &given).unwrap();
    let args: Vec<_> = file
        .steps(0, &[])
        .unwrap()
        .into_iter()
        .filter_map(|step| {
            let Instruction::Run(Run { args, .. }) = step.instruction else { return None };
            Some(args.into_iter().collect::<Vec<_>>())
        })
        .collect();
    assert_eq!(args[0], pairs(&[("A", "given"), ("B", "b-given"), ("G", "global")]));
    assert_eq!(args[1], pairs(&[("B", "b-given"), ("G", "global")]));
}

#[test]
fn commands_keep_their_variables_for_the_shell() {
    let found = steps("RUN echo \"$PATH\" 'a  b' \\$x");
    assert_eq!(found, [shell("echo \"$PATH\" 'a  b' \\$x")]);
}

#[test]
fn another_shell_is_used_from_its_line_on() {
    let found = steps("SHELL [\"/bin/bash\", \"-c\"]\nRUN echo hi");
    let command = exec(&["/bin/bash", "-c", "echo hi"]);
    assert_eq!(found, [run(command)]);
}

#[test]
fn the_escape_character_can_be_a_backtick() {
    let text = "# escape=`\nFROM base\nRUN dir `\nc:\\\nWORKDIR c:\\app";
    let file = Dockerfile::parse(text, &BTreeMap::new()).unwrap();
    let found: Vec<_> = file.steps(0, &[]).unwrap().into_iter().map(|s| s.instruction).collect();
    assert_eq!(found, [shell("dir c:\\"), Instruction::Workdir("c:\\app".to_owned())]);
}

#[test]
fn copy_can_be_a_list_for_names_with_spaces() {
    let found = steps("COPY [\"my file\", \"/to here/\"]");
    let Instruction::Copy(copy) = &found[0] else { panic!("{found:?}") };
    assert_eq!((copy.sources[0].as_str(), copy.destination.as_str()), ("my file", "/to here/"));
}

fn copy_of(instruction: &Instruction) -> &Copy {
    let (Instruction::Copy(copy) | Instruction::Add(copy)) = instruction else {
        panic!("{instruction:?}")
    };
    copy
}

#[test]
fn stages_stand_on_each_other_and_take_from_each_other() {
    let text = "ARG TAG=1\nFROM a:$TAG AS Build\nRUN one\nFROM build as next\nRUN two\n\
        FROM b\nCOPY --from=build /x /x\nCOPY --from=1 /y /y\nCOPY --from=c:2 /z /z\nFROM 0\n";
    let file = Dockerfile::parse(text, &BTreeMap::new()).unwrap();
    let bases: Vec<_> = file.stages().iter().map(|stage| stage.base.clone()).collect();
    let image = |name: &str| Base::Image(name.to_owned());
    assert_eq!(bases, [image("a:1"), Base::Stage(0), image("b"), image("0")]);
    let steps = file.steps(2, &[]).unwrap();
    let from: Vec<_> = steps.iter().map(|step| copy_of(&step.instruction).from.clone()).collect();
    let images = Some(From::Image("c:2".to_owned()));
    assert_eq!(from, [Some(From::Stage(0)), Some(From::Stage(1)), images]);
    for (wanted, found) in
        [(None, Some(3)), (Some("NEXT"), Some(1)), (Some("2"), Some(2)), (Some("x"), None)]
    {
        assert_eq!(file.target(wanted), found, "{wanted:?}");
    }
}

#[test]
fn an_argument_of_one_stage_is_not_known_in_the_next() {
    let text =
        "ARG G=g\nFROM a\nARG A=1\nARG G\nARG TARGETARCH\nRUN x\nFROM a\nLABEL l=$A-$G-$TARGETOS\n";
    let given = BTreeMap::from([("http_proxy".to_owned(), "p".to_owned())]);
    let file = Dockerfile::parse(text, &given).unwrap();
    let steps = file.steps(0, &[]).unwrap();
    let Instruction::Run(run) = &steps[0].instruction else { panic!("{steps:?}") };
    let names: Vec<_> = run.args.keys().map(String::as_str).collect();
    assert_eq!(names, ["A", "G", "TARGETARCH", "http_proxy"]);
    let steps = file.steps(1, &[]).unwrap();
    assert_eq!(steps[0].instruction, Instruction::Label(pairs(&[("l", "--")])));
}

#[test]
fn here_documents_are_scripts_input_and_files() {
    let found = steps(
        "ARG WHO=you\nRUN <<EOF\necho a\n# no comment\nEOF\nRUN cat <<A - <<-\"B\" > /x\none\nA\n\ttwo\n\tB\n\
         COPY <<EOF <<-'Q' /etc/\nhello \"$WHO\" \\$x\nEOF\n\t$WHO\n\tQ\nRUN echo $((1 << 3)) \"<<EOF\"\n",
    );
    let said = |index: usize| {
        let Instruction::Run(Run { command: Command::Shell(text), .. }) = &found[index] else {
            panic!("{found:?}")
        };
        text.as_str()
    };
    assert_eq!(said(0), "echo a\n# no comment\n");
    assert_eq!(said(1), "cat <<A - <<-\"B\" > /x\none\nA\n\ttwo\nB");
    assert_eq!(said(3), "echo $((1 << 3)) \"<<EOF\"");
    let inline: Vec<_> = copy_of(&found[2])
        .inline
        .iter()
        .map(|it| (it.name.as_str(), it.content.as_str()))
        .collect();
    assert_eq!(inline, [("EOF", "hello \"you\" \\$x\n"), ("Q", "$WHO\n")]);
    let found = steps("RUN <<EOF\n#!/usr/bin/env python3\nprint(1)\nEOF\n");
    let Instruction::Run(Run { command: Command::Exec(words), .. }) = &found[0] else {
        panic!("{found:?}")
    };
    assert_eq!(words.last().unwrap(), "#!/usr/bin/env python3\nprint(1)\n");
}

#[test]
fn mounts_say_what_is_where() {
    let found = steps(
        "ARG D=/c\nRUN --mount=type=cache,target=$D,uid=7 --mount=type=secret,id=s,required,env=S \\\n\
         --mount=type=secret,id=t,mode=0440 --mount=target=/src,source=app,ro --mount=type=tmpfs,dst=/t make\n",
    );
    let Instruction::Run(run) = &found[0] else { panic!("{found:?}") };
    let text = |text: &str| text.to_owned();
    let secret = |id: &str, required, mode, env| MountKind::Secret {
        id: text(id),
        required,
        owner: None,
        mode,
        env,
    };
    let owner = Some(text("7:0"));
    let expected = [
        ("/c", MountKind::Cache { id: text("/c"), owner, mode: None }),
        ("", secret("s", true, 0o400, Some(text("S")))),
        ("/run/secrets/t", secret("t", false, 0o440, None)),
        ("/src", MountKind::Bind { from: None, source: text("app") }),
        ("/t", MountKind::Tmpfs),
    ];
    assert_eq!(run.command, Command::Shell(text("make")));
    let found: Vec<_> = run.mounts.iter().map(|it| (it.target.as_str(), it.kind.clone())).collect();
    assert_eq!(found, expected);
}

#[test]
fn flags_of_copy_are_understood() {
    let found =
        steps("COPY --link --parents --exclude=*.md --exclude=x a b /to/\nADD --link=false a /x");
    let copy = copy_of(&found[0]);
    assert!(
        copy.parents && copy.exclude == ["*.md", "x"] && copy.sources == ["a", "b"],
        "{copy:?}"
    );
    assert!(!copy_of(&found[1]).parents);
}

#[test]
fn what_is_not_supported_is_refused_with_its_line() {
    let cases = [
        ("", "line 1", "no FROM"),
        ("RUN x\nFROM a", "line 1", "RUN comes before FROM"),
        ("FROM a AS x\nFROM b AS X", "line 2", "two stages"),
        ("FROM a AS 1", "line 1", "no name for a stage"),
        ("FROM a\n\nCOPY --from=0 a b", "line 3", "not before this one"),
        ("FROM a\nCOPY --from=7 a b", "line 2", "no stage 7"),
        ("FROM a\nCOPY --from= a b", "line 2", "no stage"),
        ("FROM a\nADD https://example.test/x /x", "line 2", "does not download"),
        ("FROM a\nADD --checksum=sha256:0 a /x", "line 2", "ADD --checksum is not supported"),
        ("FROM a\nRUN <<EOF\necho", "line 2", "<<EOF has no end"),
        ("FROM a\nRUN <<EOF\n\nEOF", "line 2", "RUN needs"),
        ("FROM a\nCOPY <<EOF\nx\nEOF", "line 2", "where to"),
        ("FROM a\nRUN --mount=type=ssh y", "line 2", "type=ssh is not supported"),
        ("FROM a\nRUN --mount=type=cache y", "line 2", "needs a target"),
        ("FROM a\nRUN --mount=type=cache,from=x,target=/y y", "line 2", "with from or source"),
        ("FROM a\nRUN --mount=type=secret,id=a/b y", "line 2", "no id of a secret"),
        ("FROM a\nRUN --mount=type=secret y", "line 2", "needs an id"),
        ("FROM a\nRUN --mount=target=/x,wild=1 y", "line 2", "wild=1 is not supported"),
        ("FROM a\nRUN --network=none y", "line 2", "--network=none is not supported"),
        ("FROM a\nFLY", "line 2", "\"FLY\" is no instruction"),
        ("FROM a\nONBUILD RUN x", "line 2", "ONBUILD"),
        ("FROM a\nCOPY a", "line 2", "where to"),
        ("FROM a\nCOPY --chmod=rwx a b", "line 2", "no mode"),
        ("FROM a\nCOPY --wild a b", "line 2", "--wild is not supported"),
        ("FROM a\nENV", "line 2", "ENV needs"),
        ("FROM a\nENV A", "line 2", "needs a value"),
        ("FROM a\nENV A=1 B", "line 2", "has no value"),
        ("FROM a\nENV =x", "line 2", "no name"),
        ("FROM a\nENV A=\"x", "line 2", "quote"),
        ("FROM a\nENV A=${B", "line 2", "not supported"),
        ("FROM a\nENV A=${B?x}", "line 2", "B is not set: x"),
        ("FROM a\nENV A=${B#x}", "line 2", "not supported"),
        ("FROM a\nWORKDIR $NOTHING", "line 2", "WORKDIR needs"),
        ("FROM a\nARG 1x=2", "line 2", "no name"),
        ("FROM a\nRUN []", "line 2", "RUN needs"),
        ("FROM a\nRUN", "line 2", "RUN needs"),
        ("FROM --platform=plan9/mips a", "line 1", "platform"),
        ("FROM $X", "line 1", "names no image"),
        ("FROM a b c d", "line 1", "FROM needs"),
        ("# escape=x\nFROM a", "line 1", "escape"),
    ];
    for (text, line, why) in cases {
        let error = error(text);
        assert!(error.starts_with(line) && error.contains(why), "{text:?}: {error}");
    }
}

#[test]
fn a_value_that_doubles_itself_is_stopped() {
    let mut text = "FROM a\nENV A=0123456789abcdef\n".to_owned();
    text.push_str(&"ENV A=$A$A\n".repeat(60));
    assert!(error(&text).contains("longer than"));
    let deep = format!("FROM a\nENV A={}", "${B:-".repeat(5000));
    assert!(error(&deep).contains("too deep"));
    assert!(error(&"#".repeat(TEXT_MAX + 1)).contains("more than"));
}

#[test]
fn a_long_value_that_is_used_on_every_line_is_stopped() {
    let long = "x".repeat(100 * 1024);
    let env = format!("FROM a\nENV A={long}\n{}", "ENV B=$A\n".repeat(1000));
    let labels = format!("FROM a\nENV A={long}\nLABEL{}\n", " b=$A".repeat(1000));
    let run = format!("FROM a\nARG A={long}\n{}", "RUN x\n".repeat(1000));
    let shell = format!("FROM a\nSHELL [\"{long}\"]\n{}", "RUN x\n".repeat(1000));
    let args = format!("ARG A={long}\n{}FROM a\n", "ARG B=$A\n".repeat(1000));
    for text in [env, labels, run, shell, args] {
        assert!(error(&text).contains("all values together"));
    }
}

fn fragments() -> impl Strategy<Value = String> {
    let fragment = prop_oneof![
        Just("FROM a\n"),
        Just("RUN "),
        Just("ENV "),
        Just("COPY "),
        Just("ADD "),
        Just("ARG "),
        Just("LABEL "),
        Just("\n"),
        Just("\\\n"),
        Just("\\"),
        Just("\""),
        Just("'"),
        Just("$"),
        Just("${"),
        Just("}"),
        Just(":-"),
        Just("="),
        Just("["),
        Just("]"),
        Just("a"),
        Just(" "),
        Just("--"),
        Just("#"),
        Just("escape=`"),
        Just("ä"),
        Just("<<"),
        Just("\0"),
        Just("SHELL "),
        Just("<<EOF"),
        Just("<<-\"E\""),
        Just("EOF\n"),
        Just("--from=a "),
        Just("--mount=type=cache,target=/x "),
    ];
    proptest::collection::vec(fragment, 0..40).prop_map(|parts| parts.concat())
}

proptest! {
    #[test]
    fn no_text_makes_it_panic(text in "\\PC*") {
        let _ = Dockerfile::parse(&text, &BTreeMap::new());
        let _ = Dockerfile::parse(&format!("FROM a\n{text}"), &BTreeMap::new());
    }

    #[test]
    fn no_combination_of_its_own_words_makes_it_panic(text in fragments()) {
        let _ = Dockerfile::parse(&format!("FROM a\n{text}"), &BTreeMap::new());
    }

    #[test]
    fn a_quoted_value_arrives_as_it_is(value in "[a-zA-Z0-9 .,:/=#-]{0,40}") {
        let found = steps(&format!("ENV A='{value}' B=\"{value}\""));
        prop_assert_eq!(&found[0], &Instruction::Env(pairs(&[("A", &value), ("B", &value)])));
    }
}
