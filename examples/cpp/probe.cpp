// The probe environment, probe-v1: what a checker of clients reads.
#include "plugrl_client.hpp"

class Probe : public plugrl::Env {
  public:
    explicit Probe(std::size_t index) : length_(3 + 2 * static_cast<int>(index % 3)) {}

    void reset() override {
        t_ = 0;
        std::fill(a_.begin(), a_.end(), 0.0);
    }

    plugrl::Outcome step(const std::vector<double>& action) override {
        ++t_;
        a_ = action;
        return {1.0, t_ == length_, false};
    }

    plugrl::Observation observe() const override {
        return {{}, {{"t", {static_cast<double>(t_)}}, {"a", a_}}, "probe"};
    }

    void use_action_dim(std::size_t dim) override { a_.resize(dim); }
    int state_bytes() const override { return 8; }

  private:
    int length_, t_ = 0;
    std::vector<double> a_ = std::vector<double>(3);
};

int main(int argc, char** argv) {
    const auto none = [](const std::string&, const std::string&) { return false; };
    const plugrl::Options options = plugrl::Options::parse(argc, argv, none);
    std::vector<std::unique_ptr<plugrl::Env>> envs;
    for (std::size_t i = 0; i < options.num_envs; ++i) envs.push_back(std::make_unique<Probe>(i));
    plugrl::Client client(options, std::move(envs));
    const int code = client.run();
    std::cout << "exit " << code << " after " << client.episodes() << " episodes\n";
    return code;
}
